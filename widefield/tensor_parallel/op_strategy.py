"""What a Way is: how one operation can run where ranks have parts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from widefield.capture.ir import Node, Value
from widefield.tensor_parallel.placement import Part, split_along


class State(Enum):
    """What a tensor is on the ranks, if it is no Part."""

    WHOLE = "whole"
    """Every rank has it, and its whole gradient."""
    ENTERED = "entered"
    """Every rank has it, and brings a part of its gradient."""
    SUM = "sum"
    """What all ranks have must be added up."""


WHOLE, ENTERED, SUM = State.WHOLE, State.ENTERED, State.SUM
Layout = State | Part


@dataclass
class Way:
    """wants: what the values that are read must be; others whole, or entered where there is a part among them.

    outs: of the results, in order.  args, op: what to run on a rank's tensors instead of the node's own, by rank.
    bias: a value that is added to the first result along `bias_dim`, once that is added up.
    """

    wants: dict[Value, Layout]
    outs: list[Layout]
    args: Callable[[int], tuple] | None = None
    op: Callable | None = None
    bias: Value | None = None
    bias_dim: int = 0

    def want(self, value: Value) -> Layout:
        has_parts = any(isinstance(layout, Part) for layout in (*self.wants.values(), *self.outs))
        return self.wants.get(value, ENTERED if has_parts or SUM in self.outs else WHOLE)


@dataclass
class Cutter:
    """Of how many ranks, and which parts of a new whole's dim are worth a try."""

    size: int
    tried: Callable[[Value, int], list[Part]] = field(default=lambda value, dim: [])


Given = Mapping[Value, Part]
Rule = Callable[[Node, Given, Cutter], Iterator[Way]]


def even(value: Value, dim: int, cutter: Cutter) -> list[Part]:
    """A dim dealt out in even runs, where there is something for each rank."""
    return [Part(dim, split_along((value.shape[dim],), 0, cutter.size))] if value.shape[dim] >= cutter.size else []
