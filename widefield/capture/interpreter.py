"""Runs a captured graph in place of a module's forward, so that a rank can compute a part of the module.

A `ForwardOverride` is installed in a module by changing its class; the module stays the same object.  It builds a Program for
each shape of inputs, and autograd differentiates the operations of a Program like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.containers import refuse_hidden
from widefield.capture.decompositions import BATCH_NORM_OVER
from widefield.capture.fake_parameters import tensors_of
from widefield.capture.ir import Graph, Node, Value, put_in
from widefield.capture.program_cache import constants_of
from widefield.capture.trace import without_autocast
from widefield.module_wrapping import Wrapping, wrap_class
from widefield.private_torch.fake_tensors import is_captured
from widefield.tiled.batch_statistics import batch_norm_over

_OVERRIDE = "_widefield_override"
aten = torch.ops.aten


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *args: Any) -> Any:
    """torch's batch norm on copies of the running statistics: autograd saves them, and buffers change before the backward."""
    return aten._native_batch_norm_legit_functional.default(x, weight, bias, mean.clone(), var.clone(), *args)


_RUNS_AS: dict[Any, Callable] = {
    BATCH_NORM_OVER: batch_norm_over,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.view.default: aten.reshape.default,
}
"""What runs in place of recorded operations.  BATCH_NORM_OVER is only a marker in the graph.  `view` becomes `reshape`, since a
shard or a received tensor may have other strides; a copy is as good, since a graph writes nothing through views."""


class ForwardOverride:
    """Base class of what runs in place of a module's forward."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """What the module returns."""
        raise NotImplementedError


class RankShardModule(Wrapping):
    """Put before the class of a module with one rank's shard of the weights by `install_shard`; copies and pickles get it too.

    A call of a copy raises RuntimeError: one rank's shards would give wrong numbers, often of the right shape.
    """

    COPIED = ("_widefield_of_one_rank",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if override_of(self) is None:
            raise RuntimeError(
                f"this {type(self).__qualname__} is a copy of what one rank has of a model in mesh.channel or mesh.stage, "
                "which alone gives no model's numbers; copy the model before parallelize, or load its checkpoint's export"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class OverriddenModule(Wrapping):
    """Put before a module's own class by `install`.  Copies and pickles are plain modules."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        override: ForwardOverride | None = self.__dict__.get(_OVERRIDE)
        refuse_hidden(self, (args, kwargs), "is given")
        tensors = tensors_of((args, kwargs))
        if override is None or any(is_captured(tensor) for tensor in tensors):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the module is being captured
        if torch.compiler.is_compiling():
            return torch.compiler.disable(override.call)(self, args, kwargs)
        return override.call(self, args, kwargs)


def install(module: nn.Module, override: ForwardOverride) -> None:
    """Let `override` run calls of `module`; it replaces an earlier one."""
    wrap_class(module, OverriddenModule)
    module.__dict__[_OVERRIDE] = override


def install_shard(module: nn.Module, override: ForwardOverride) -> None:
    """`install` for a module that has one rank's shard of its weights; copies and pickles are `RankShardModule`."""
    wrap_class(module, RankShardModule)
    vars(module)[RankShardModule.COPIED[0]] = True
    install(module, override)


def refuse_streams(module: nn.Module, axis: str) -> None:
    """ValueError if a part of the module is streamed, which a graph of the whole module would ignore."""
    for name, part in module.named_modules():
        if "_stream" in vars(part):
            raise ValueError(
                f"{axis} runs the operations of a whole model and {f'its part {name}' if name else 'this model'} is streamed, "
                f"which would run whole then; leave out widefield.stream, or set {axis.partition('=')[0]}=1"
            )


def override_of(module: nn.Module) -> ForwardOverride | None:
    """What `install` has put in place of the module's forward, or None."""
    return vars(module).get(_OVERRIDE)


# ---------------------------------------------------------------------------------------------- running


class Program:
    """Operations in order, which free each tensor after its last use.

    keep: the values that are not freed, since they are read afterwards.
    """

    def __init__(self, nodes: Sequence[Node], keep: Iterable[Value]) -> None:
        last: dict[Value, int] = {}
        for number, node in enumerate(nodes):
            last.update(dict.fromkeys([*node.reads, *(out for out in node.outs if out is not None)], number))
        for value in keep:
            last.pop(value, None)
        done: list[list[Value]] = [[] for _ in nodes]
        for value, number in last.items():
            done[number].append(value)
        self.steps = [(_filler(node), node, _records_gradient(node), over) for node, over in zip(nodes, done, strict=True)]

    def run(self, found: dict[Value, Any]) -> None:
        """Run all operations.  found: the tensors of values; results are added to it, and values that are not kept removed."""
        for fill, node, records_gradient, done in self.steps:
            if records_gradient or not torch.is_grad_enabled():
                out = fill(found)
            else:
                with torch.no_grad():
                    out = fill(found)
            if node.is_single:
                if node.outs[0] is not None:
                    found[node.outs[0]] = out
            else:
                found.update({value: tensor for value, tensor in zip(node.outs, out, strict=True) if value is not None})
            for value in done:
                found.pop(value, None)


def _records_gradient(node: Node) -> bool:
    """Whether autograd records the node: torch has no derivative of draws whose numbers have no gradient, such as integers."""
    return node.grad and (not node.draws or any(out is not None and out.wants_grad for out in node.outs))


def _filler(node: Node) -> Callable[[Mapping[Value, Any]], Any]:
    """A function that calls a node's operation on a run's tensors; fast if all values are direct positional arguments."""
    op, reads = _RUNS_AS.get(node.op, node.op), node.reads
    places = [(place, argument) for place, argument in enumerate(node.args) if isinstance(argument, Value)]
    template = list(node.args)

    def call(found: Mapping[Value, Any]) -> Any:
        given = template.copy()
        for place, value in places:
            given[place] = found[value]
        return op(*given)

    def call_nested(found: Mapping[Value, Any]) -> Any:
        args, kwargs = node.filled(iter([found[value] for value in reads]))
        return op(*args, **kwargs)

    return call_nested if node.kwargs or len(places) != len(reads) else call


class GraphProgram:
    """A module's graph as a function of the module's weights and arguments."""

    def __init__(self, module: nn.Module, graph: Graph) -> None:
        self.graph, self.program, self.generators = graph, Program(graph.nodes, graph.results), graph.generators
        self.constants = constants_of(module, graph)

    def __call__(self, weights: Mapping[str, Tensor], args: tuple, kwargs: dict) -> Any:
        """What the module returns; buffers in `weights` are updated."""
        graph = self.graph
        found: dict[Value, Any] = dict(zip(graph.inputs, tensors_of((args, kwargs)), strict=True))
        found |= {value: weights[name] for name, value in graph.weights.items()}
        found |= {value: constant.now() for value, constant in self.constants.items()}
        with without_autocast():
            self.program.run(found)
        with torch.no_grad():
            for name, value in graph.updates.items():
                weights[name].copy_(found[value])
        return put_in(graph.outputs, found)
