"""Runs a module as the operations that were written down when it was followed: the way in which a rank computes another part
of a module than the module's own code says.

A `Flow` is laid into a module by changing its class, so that the module stays the object it was; it makes a Program for each
shape of inputs that comes, and autograd differentiates what a Program runs as it does any other operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves, tree_map

from widefield.engine.normalization import batch_norm_over
from widefield.engine.stream.apart import BATCH_NORM_OVER
from widefield.engine.stream.follow import tensors_of
from widefield.engine.stream.graph import Graph, Node, Value

_FLOW = "_widefield_flow"
aten = torch.ops.aten


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *args: Any) -> Any:
    """torch's batch norm, with copies of the running statistics, which it would keep for a backward that never reads them."""
    return aten._native_batch_norm_legit_functional.default(x, weight, bias, mean.clone(), var.clone(), *args)


_RUNS_AS: dict[Any, Callable] = {
    BATCH_NORM_OVER: batch_norm_over,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
}
"""What runs in place of operations that are names alone, or that hold on to buffers."""


class Flow:
    """How a module is run.  `call` gets the module and its arguments; a subclass says what happens."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter and buffer of which this rank holds a part alone, the whole's shape."""
        return {}


class Executed(nn.Module):
    """Put before a module's own class by `lay`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        flow: Flow | None = self.__dict__.get(_FLOW)
        tensors = tensors_of((args, kwargs))
        if flow is None or any(isinstance(tensor, (FunctionalTensor, FakeTensor)) for tensor in tensors):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # somebody follows the module
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(flow.call)(self, args, kwargs)
        return flow.call(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is the plain module, with the parameters that this rank holds."""
        _, _, state, *rest = super().__reduce_ex__(protocol)
        plain = {key: value for key, value in state.items() if key != _FLOW}
        return _new, (type(self).__mro__[2],), plain, *rest


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@cache
def _executed(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Executed, kind), names)


def lay(module: nn.Module, flow: Flow) -> None:
    """From now on calls of `module` are the flow's, in place of one that is there."""
    if not isinstance(module, Executed):
        module.__class__ = _executed(type(module))
    module.__dict__[_FLOW] = flow


def flow_of(module: nn.Module) -> Flow | None:
    """What runs the module; None for one that runs its own code."""
    return vars(module).get(_FLOW)


# ---------------------------------------------------------------------------------------------- running


class Program:
    """Operations in the order in which they run, and after which of them a tensor is needed no more.

    keep: the values that are looked at afterwards.
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
        self.steps = [(_filler(node), node, over) for node, over in zip(nodes, done, strict=True)]

    def run(self, found: dict[Value, Any]) -> None:
        """Run all operations on the tensors in `found`, which has what they make afterwards, and no more what is used up."""
        for fill, node, done in self.steps:
            if node.grad or not torch.is_grad_enabled():
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


def _filler(node: Node) -> Callable[[Mapping[Value, Any]], Any]:
    """Calls a node's operation with the tensors of a run, quickly where its values stand at the top of its arguments."""
    op, kwargs = _RUNS_AS.get(node.op, node.op), node.kwargs
    places = [(place, argument) for place, argument in enumerate(node.args) if isinstance(argument, Value)]
    if kwargs or len(places) != len(node.reads):
        return lambda found: _RUNS_AS.get(node.op, node.op)(*_filled(node, found)[0], **_filled(node, found)[1])
    template = list(node.args)

    def call(found: Mapping[Value, Any]) -> Any:
        given = template.copy()
        for place, value in places:
            given[place] = found[value]
        return op(*given)

    return call


def _filled(node: Node, found: Mapping[Value, Any]) -> tuple[tuple, dict]:
    return node.filled(iter([found[value] for value in node.reads]))


class Whole:
    """A graph as a program from a module's arguments to what it returns."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.program = graph, Program(graph.nodes, graph.results)

    def __call__(self, weights: Mapping[str, Tensor], args: tuple, kwargs: dict) -> Any:
        """What the module would return; buffers are updated."""
        graph = self.graph
        found: dict[Value, Any] = dict(zip(graph.inputs, tensors_of((args, kwargs)), strict=True))
        found |= {value: weights[name] for name, value in graph.weights.items()}
        found |= dict(graph.constants)
        with without_autocast():
            self.program.run(found)
        with torch.no_grad():
            for name, value in graph.updates.items():
                weights[name].copy_(found[value])
        return tree_map(lambda leaf: found[leaf] if isinstance(leaf, Value) else leaf, graph.outputs, is_leaf=is_value)


@dataclass(frozen=True)
class Like:
    """Stands for a tensor where a module is followed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    def read(self, *_: Any) -> Tensor:
        raise TypeError("this stands for a tensor and has no pixels")

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None, shape: Sequence[int] | None = None) -> Like:
        """As a tensor, on another device or of another shape."""
        return cls(tuple(tensor.shape if shape is None else shape), tensor.dtype, device or tensor.device, tensor.requires_grad)


def is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def without_autocast() -> ExitStack:
    """Inside, autocast is off: its casts are operations of the graph already."""
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def key_of(module: nn.Module, parts: Sequence[nn.Module], args: tuple, kwargs: dict) -> tuple:
    """What the operations of a call depend on: inputs' shapes and kinds, plain arguments, modes, autocast.

    parts: the module's modules, listed once.
    """
    tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad, getattr(t, "laid", None)) for t in tensors_of((args, kwargs)))
    others = tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor))
    cast = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda"))
    modes = tuple((part.training, "ghost" in part.__dict__) for part in parts)
    return tensors, others, modes, cast, torch.is_grad_enabled()
