"""What an OpStrategy is: how one operation can run where ranks have parts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from widefield.capture.ir import Node, Value
from widefield.tensor_parallel.placement import Shard, split_along


class Replication(Enum):
    """What a tensor is on the ranks, if it is no Shard."""

    WHOLE = "whole"
    """Every rank has it, and its whole gradient."""
    ENTERED = "entered"
    """Every rank has it, and brings a part of its gradient."""
    SUM = "sum"
    """What all ranks have must be added up."""


WHOLE, ENTERED, SUM = Replication.WHOLE, Replication.ENTERED, Replication.SUM
Placement = Replication | Shard


@dataclass
class OpStrategy:
    """wants: what the values that are read must be; others whole, or entered where there is a part among them.

    outs: of the results, in order.  args, op: what to run on a rank's tensors instead of the node's own, by rank.
    bias: a value that is added to the first result along `bias_dim`, once that is added up.
    """

    wants: dict[Value, Placement]
    outs: list[Placement]
    args: Callable[[int], tuple] | None = None
    op: Callable | None = None
    bias: Value | None = None
    bias_dim: int = 0

    def want(self, value: Value) -> Placement:
        has_parts = any(isinstance(layout, Shard) for layout in (*self.wants.values(), *self.outs))
        return self.wants.get(value, ENTERED if has_parts or SUM in self.outs else WHOLE)


@dataclass
class Cutter:
    """Of how many ranks, and which parts of a new whole's dim are worth a try."""

    size: int
    tried: Callable[[Value, int], list[Shard]] = field(default=lambda value, dim: [])


Given = Mapping[Value, Shard]
Rule = Callable[[Node, Given, Cutter], Iterator[OpStrategy]]


def even(value: Value, dim: int, cutter: Cutter) -> list[Shard]:
    """A dim dealt out in even runs, where there is something for each rank."""
    return [Shard(dim, split_along((value.shape[dim],), 0, cutter.size))] if value.shape[dim] >= cutter.size else []
