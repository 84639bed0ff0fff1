"""The graph of a module's forward: values, and the operations between them, as torch's dispatcher saw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.private_torch.tensors import cdata


@dataclass(eq=False)
class Value:
    """A tensor of the captured run, without its numbers.

    order: its dims from the outermost in memory to the innermost.
    source: "input", "weight" (a parameter or buffer), "constant" (any other tensor of the module), or "made" by an operation.
    name: of a weight, its name in the module; of an input or constant, its index among these.
    wants_grad: whether it needs a gradient.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    source: str = "made"
    name: str = ""
    wants_grad: bool = False
    maker: Node | None = None
    users: list[Node] = field(default_factory=list)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.source}{self.number}{list(self.shape)}"


def put_in(nested: Any, found: Mapping[Value, Any]) -> Any:
    """Nested arguments or outputs with `found[value]` in place of each value."""
    return tree_map(lambda leaf: found[leaf] if isinstance(leaf, Value) else leaf, nested)


@dataclass(eq=False)
class Node:
    """One operation: its arguments, with a Value in place of each tensor, and its results.

    outs: the results in order, None for those that are no tensors or are not used.  is_single: it returns one tensor, no tuple.
    grad: whether gradients were enabled.  draws: whether it draws random numbers.
    path: the qualified name of the submodule that called it; "" for the module's own forward.
    """

    op: Callable
    args: tuple
    kwargs: dict
    outs: list[Value | None]
    is_single: bool
    grad: bool = True
    draws: bool = False
    path: str = ""

    @property
    def name(self) -> str:
        """Torch's name of the operation, without overload: `softmax`."""
        op = self.op.args[0] if isinstance(self.op, partial) else self.op
        op = getattr(op, "overloadpacket", op)
        return str(getattr(op, "__name__", op)).removeprefix("aten.").split(".")[0]

    @property
    def reads(self) -> list[Value]:
        """The tensor arguments in order, lists flattened; a tensor that is given twice counts twice."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    @property
    def generator(self) -> torch.Generator | None:
        """The torch.Generator among its arguments, or None."""
        return next((leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Generator)), None)

    def call(self, tensors: Iterator[Tensor]) -> Any:
        """Run the operation on real tensors, one for each of `reads`."""
        args, kwargs = self.filled(tensors)
        return self.op(*args, **kwargs)

    def filled(self, tensors: Iterator[Any]) -> tuple[tuple, dict]:
        """The arguments with `tensors`, in order, in place of the values."""
        return tree_map(lambda leaf: next(tensors) if isinstance(leaf, Value) else leaf, (self.args, self.kwargs))

    def __repr__(self) -> str:
        return f"{self.op}({self.reads}) -> {self.outs}"


@dataclass
class Graph:
    """A captured forward.  nodes: in the order in which they ran; `link` drops those whose results are not used.

    outputs: what the module returned, with Values in place of tensors.  updates: the new values of buffers, by name.
    """

    inputs: list[Value]
    weights: dict[str, Value]
    constants: list[tuple[Value, Tensor]]
    nodes: list[Node]
    outputs: Any
    updates: dict[str, Value]

    @property
    def generators(self) -> list[torch.Generator | None]:
        """The generators that it draws from; None stands for torch's default generator."""
        found = {None if g is None else cdata(g): g for g in (node.generator for node in self.nodes if node.draws)}
        return list(found.values())

    @property
    def results(self) -> list[Value]:
        """The values that are outputs or new values of buffers, each once."""
        outputs = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Value)]
        return list(dict.fromkeys([*outputs, *self.updates.values()]))


def link(graph: Graph) -> Graph:
    """Drop nodes whose results are not used, but keep draws, and set `maker` and `users` of each value; the same graph."""
    needed = set(graph.results)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.draws or any(out in needed for out in node.outs):
            node.outs = [out if out in needed else None for out in node.outs]
            needed.update(node.reads)
            nodes.append(node)
    graph.nodes = nodes[::-1]
    for value in [*graph.inputs, *graph.weights.values(), *needed]:
        value.users = []
    for node in graph.nodes:
        for out in node.outs:
            if out is not None:
                out.maker = node
        for value in dict.fromkeys(node.reads):
            value.users.append(node)
    return graph
