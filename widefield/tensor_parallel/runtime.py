"""Runs a module whose channels are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from widefield.capture.fake_parameters import Like, named_tensors
from widefield.capture.interpreter import ForwardOverride, GraphProgram, OverriddenModule
from widefield.capture.ir import Graph
from widefield.capture.program_cache import ProgramCache
from widefield.capture.python_watch import Guards
from widefield.capture.trace import trace
from widefield.geometry.strides import stride_order
from widefield.tensor_parallel.collectives import Exchange, Ranks
from widefield.tensor_parallel.placement import Shard
from widefield.tensor_parallel.search import ShardedGraph, choose
from widefield.tiled.redistribute import dense_strides
from widefield.tiled.rng import compare_generators


class TensorParallelForward(ForwardOverride):
    """The forward of a module with sharded channels; shards the module's weights when it is made.

    likes: what the forward is called with.  shards: of every sharded weight, by name.  shapes, strides: of every full weight
    and buffer, by name.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, likes: tuple[Like, ...], device: torch.device) -> None:
        self.device = device
        self.ranks, self.shapes = ranks, {name: tuple(t.shape) for name, t in named_tensors(module).items()}
        self.strides = {name: dense_strides(tensor) for name, tensor in named_tensors(module).items()}
        self.shards: dict[str, Shard] = {}
        self.known: ProgramCache[GraphProgram] = ProgramCache()
        self.shards = dict(self._capture(module, likes, {}, None).shards)
        self._shard_weights(module)
        self.initial = self._capture(module, likes, {}, self.shards)
        """The sharded graph for a batch like `likes`."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """What the module returns, on every rank of the axis."""

        def make(guards: Guards) -> GraphProgram:
            return GraphProgram(module, self.graph_of(module, args, kwargs, guards=guards))

        program = self.known.get(module, args, kwargs, make)
        for generator in program.generators if self.ranks.group is not None else ():
            compare_generators(self.ranks.group, self.device if generator is None else generator.device, generator)
        return program(named_tensors(module), args, kwargs)

    def graph_of(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        likes: Mapping[str, Any] = MappingProxyType({}),
        guards: Guards | None = None,
    ) -> Graph:
        """The graph that this rank runs for these arguments, on its shards of the weights.

        likes: stand-ins for weights on other ranks (stages), by name.  guards: see `trace`.
        """
        return self._capture(module, args, kwargs, self.shards, likes, guards).graph

    def exchanges(self) -> dict[str, Exchange]:
        """The Exchange of every sharded weight, by name."""
        return {name: Exchange(part, self.ranks, stride_order(self.strides[name])) for name, part in self.shards.items()}

    def _capture(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        shards: dict[str, Shard] | None,
        likes: Mapping[str, Any] = MappingProxyType({}),
        guards: Guards | None = None,
    ) -> ShardedGraph:
        local = {**named_tensors(module), **likes}
        full = {name: Like.whole(local[name], self.shapes[name], self.strides[name]) for name in self.shards}
        likes = {**likes, **full}
        forward = super(OverriddenModule, module).forward if isinstance(module, OverriddenModule) else module.forward  # type: ignore[misc]
        graph = trace(module, forward, args, kwargs, likes=likes, aim="cut by channels", guards=guards)
        return choose(graph, self.ranks, shards)

    @torch.no_grad()
    def _shard_weights(self, module: nn.Module) -> None:
        """Replace the data of each sharded weight by this rank's shard; the parameters stay the same objects."""
        weights = named_tensors(module)
        for name, exchange in self.exchanges().items():
            weights[name].data = exchange.take_shard(weights[name].detach()).clone()
