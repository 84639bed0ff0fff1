"""A module's forward as data: values and the operations between them, as torch's dispatcher saw them on the whole image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.private_torch.tensors import cdata


@dataclass(eq=False)
class Value:
    """A tensor of the whole run, without its pixels.

    order: its dims from the outermost in memory to the innermost.
    source: "input", "weight" (a parameter or buffer) or "constant" for what is there before the first operation; else "made".
    name: of a weight, its name in the module; of an input or constant, its place among these.
    wants_grad: whether its gradient is asked for.
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
    """Arguments or outputs, however nested, with what was found for each value in its place."""
    return tree_map(lambda leaf: found[leaf] if isinstance(leaf, Value) else leaf, nested)


@dataclass(eq=False)
class Node:
    """One operation: its arguments with a Value in place of each tensor, and what it gives.

    outs: the results in order, None for those that are no tensors or that nobody asks for.  is_single: it gives one tensor.
    grad: whether gradients were on.  draws: whether it draws random numbers, which happens once and is remembered.
    """

    op: Callable
    args: tuple
    kwargs: dict
    outs: list[Value | None]
    is_single: bool
    grad: bool = True
    draws: bool = False

    @property
    def reads(self) -> list[Value]:
        """The tensor arguments in order, lists one by one; a tensor that is given twice counts twice."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    @property
    def generator(self) -> torch.Generator | None:
        """The one that it is given."""
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
    """nodes: in the order in which they ran, without those whose results nobody needs.

    outputs: what the module returned, Values in place of tensors.  updates: the values that buffers have afterwards.
    """

    inputs: list[Value]
    weights: dict[str, Value]
    constants: list[tuple[Value, Tensor]]
    nodes: list[Node]
    outputs: Any
    updates: dict[str, Value]

    @property
    def generators(self) -> list[torch.Generator | None]:
        """Those that it draws from; None stands for torch's own."""
        found = {None if g is None else cdata(g): g for g in (node.generator for node in self.nodes if node.draws)}
        return list(found.values())

    @property
    def results(self) -> list[Value]:
        """All values that outlive the run."""
        outputs = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Value)]
        return list(dict.fromkeys([*outputs, *self.updates.values()]))


def link(graph: Graph) -> Graph:
    """Drop what nobody needs, and note who makes and who uses each value."""
    needed = set(graph.results)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.draws or any(out in needed for out in node.outs):
            node.outs = [out if out in needed else None for out in node.outs]
            needed.update(node.reads)
            kept.append(node)
    graph.nodes = kept[::-1]
    for value in [*graph.inputs, *graph.weights.values(), *needed]:
        value.users = []
    for node in graph.nodes:
        for out in node.outs:
            if out is not None:
                out.maker = node
        for value in dict.fromkeys(node.reads):
            value.users.append(node)
    return graph
