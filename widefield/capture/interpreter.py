"""Runs a module as the operations that were written down when it was followed: the way in which a rank computes another part
of a module than the module's own code says.

A `ForwardOverride` is installed in a module by changing its class, so that the module stays the object it was; it makes a
Program for each shape of inputs that comes, and autograd differentiates what a Program runs as it does any other operations.
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
from widefield.private_torch.fake_tensors import FakeTensor, FunctionalTensor
from widefield.tiled.batch_statistics import batch_norm_over

_FLOW = "_widefield_flow"
aten = torch.ops.aten


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *args: Any) -> Any:
    """torch's batch norm, with copies of the running statistics, which it would keep for a backward that never reads them."""
    return aten._native_batch_norm_legit_functional.default(x, weight, bias, mean.clone(), var.clone(), *args)


_RUNS_AS: dict[Any, Callable] = {
    BATCH_NORM_OVER: batch_norm_over,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.view.default: aten.reshape.default,
}
"""What runs in place of operations that are names alone, that hold on to buffers, or that want an order in memory: nothing is
written through a view here, so a copy does, where a part of a tensor or what came in a message lies otherwise."""


class ForwardOverride:
    """How a module is run.  `call` gets the module and its arguments; a subclass says what happens."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError


class RankShardModule(Wrapping):
    """Put before a module's own class by `install_shard`: a module, its copies and pickles have one rank's part of the weights.

    Copies compute nothing: alone, what one rank has would give other numbers, often of the right shape.
    """

    COPIED = ("_widefield_of_one_rank",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if override_of(self) is None:
            raise RuntimeError(
                f"this {type(self).__qualname__} is a copy of what one rank has of a model in mesh.channel or mesh.stage, "
                "which alone gives no model's numbers; copy the model before it is laid out, or load its checkpoint's export"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class OverriddenModule(Wrapping):
    """Put before a module's own class by `install`.  A copy or a pickle is the plain module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        override: ForwardOverride | None = self.__dict__.get(_FLOW)
        refuse_hidden(self, (args, kwargs), "is given")
        tensors = tensors_of((args, kwargs))
        if override is None or any(isinstance(tensor, (FunctionalTensor, FakeTensor)) for tensor in tensors):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # somebody follows the module
        if torch.compiler.is_compiling():
            return torch.compiler.disable(override.call)(self, args, kwargs)
        return override.call(self, args, kwargs)


def install(module: nn.Module, override: ForwardOverride) -> None:
    """From now on calls of `module` are the flow's, in place of one that is there."""
    wrap_class(module, OverriddenModule)
    module.__dict__[_FLOW] = override


def install_shard(module: nn.Module, override: ForwardOverride) -> None:
    """`install` for a module that has what one rank has of its weights; copies and pickles are `RankShardModule`."""
    wrap_class(module, RankShardModule)
    vars(module)[RankShardModule.COPIED[0]] = True
    install(module, override)


def refuse_streams(module: nn.Module, axis: str) -> None:
    """ValueError where a part of a module runs tile after tile, which the operations of the whole module would not."""
    for name, part in module.named_modules():
        if "_stream" in vars(part):
            raise ValueError(
                f"{axis} runs the operations of a whole model and {f'its part {name}' if name else 'this model'} is streamed, "
                f"which would run whole then; leave out widefield.stream, or set {axis.partition('=')[0]}=1"
            )


def override_of(module: nn.Module) -> ForwardOverride | None:
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
        self.steps = [(_filler(node), node, _learns(node), over) for node, over in zip(nodes, done, strict=True)]

    def run(self, found: dict[Value, Any]) -> None:
        """Run all operations on the tensors in `found`, which has what they make afterwards, and no more what is used up."""
        for fill, node, learns, done in self.steps:
            if learns or not torch.is_grad_enabled():
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


def _learns(node: Node) -> bool:
    """Whether gradients are on while it runs: of a draw whose numbers have none, as integers, torch has no derivative."""
    return node.grad and (not node.draws or any(out is not None and out.wants_grad for out in node.outs))


def _filler(node: Node) -> Callable[[Mapping[Value, Any]], Any]:
    """Calls a node's operation with the tensors of a run, quickly where its values stand at the top of its arguments."""
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
    """A graph of a module as a program from the module's arguments to what it returns."""

    def __init__(self, module: nn.Module, graph: Graph) -> None:
        self.graph, self.program, self.generators = graph, Program(graph.nodes, graph.results), graph.generators
        self.constants = constants_of(module, graph)

    def __call__(self, weights: Mapping[str, Tensor], args: tuple, kwargs: dict) -> Any:
        """What the module would return; buffers are updated."""
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
