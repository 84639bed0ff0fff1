"""Runs a module on ranks that share its channels."""

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
from widefield.tensor_parallel.search import Chosen, choose
from widefield.tiled.redistribute import dense_strides
from widefield.tiled.rng import compare_generators


class TensorParallelForward(ForwardOverride):
    """parts: of every weight of which each rank holds a part, by name.  shapes, strides: its own, on the whole."""

    def __init__(self, module: nn.Module, ranks: Ranks, like: Like, device: torch.device) -> None:
        self.device = device
        self.ranks, self.shapes = ranks, {name: tuple(t.shape) for name, t in named_tensors(module).items()}
        self.strides = {name: dense_strides(tensor) for name, tensor in named_tensors(module).items()}
        self.parts: dict[str, Shard] = {}
        self.known: ProgramCache[GraphProgram] = ProgramCache()
        self.parts = dict(self._chosen(module, (like,), {}, None).stored)
        self._cut(module)
        self.first = self._chosen(module, (like,), {}, self.parts)
        """What was chosen for a batch like `like`, its weights being held as they are."""

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
        """What this rank runs for these arguments, on its parts of the weights.  likes: of weights that are not here.

        guards: see `trace`.
        """
        return self._chosen(module, args, kwargs, self.parts, likes, guards).graph

    def exchanges(self) -> dict[str, Exchange]:
        """How a weight's parts become the whole and the other way, of every weight that is cut."""
        return {name: Exchange(part, self.ranks, stride_order(self.strides[name])) for name, part in self.parts.items()}

    def _chosen(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        stored: dict[str, Shard] | None,
        likes: Mapping[str, Any] = MappingProxyType({}),
        guards: Guards | None = None,
    ) -> Chosen:
        held = {**named_tensors(module), **likes}
        wholes = {name: Like.whole(held[name], self.shapes[name], self.strides[name]) for name in self.parts}
        likes = {**likes, **wholes}
        forward = super(OverriddenModule, module).forward if isinstance(module, OverriddenModule) else module.forward  # type: ignore[misc]
        graph = trace(module, forward, args, kwargs, likes=likes, aim="cut by channels", guards=guards)
        return choose(graph, self.ranks, stored)

    @torch.no_grad()
    def _cut(self, module: nn.Module) -> None:
        """Leave this rank its part of each weight; the parameters stay the objects they were."""
        held = named_tensors(module)
        for name, exchange in self.exchanges().items():
            held[name].data = exchange.keep(held[name].detach()).clone()
