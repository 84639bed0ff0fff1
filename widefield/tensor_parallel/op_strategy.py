"""OpStrategy: how one operation can run where its tensors are sharded over the channel axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from widefield.capture.ir import Node, Value
from widefield.tensor_parallel.placement import Shard, split_along


class Unsharded(Enum):
    """The placements of a tensor on the ranks of the channel axis that are no Shard."""

    WHOLE = "whole"
    """Every rank has the tensor and its whole gradient."""
    PARTIAL_GRADIENT = "partial gradient"
    """Every rank has the tensor; its gradient is the sum of all ranks' gradients."""
    PARTIAL = "partial"
    """The tensor is the sum of all ranks' tensors."""


WHOLE, PARTIAL_GRADIENT, PARTIAL = Unsharded.WHOLE, Unsharded.PARTIAL_GRADIENT, Unsharded.PARTIAL
Placement = Unsharded | Shard


@dataclass
class OpStrategy:
    """One way to run an operation.  wants: the placements of the values that it reads; see `want` for others.

    outs: the placements of its results, in order.
    args, op: what a rank runs instead of the node's own arguments (`args(rank)`) and operation.
    bias: a value that is added to the first result along `bias_dim` after that is all-reduced.
    """

    wants: dict[Value, Placement]
    outs: list[Placement]
    args: Callable[[int], tuple] | None = None
    op: Callable | None = None
    bias: Value | None = None
    bias_dim: int = 0

    def want(self, value: Value) -> Placement:
        """The placement in which a value is read.  By default PARTIAL_GRADIENT if the work is sharded, else WHOLE."""
        is_sharded = any(isinstance(placement, Shard) for placement in (*self.wants.values(), *self.outs))
        return self.wants.get(value, PARTIAL_GRADIENT if is_sharded or PARTIAL in self.outs else WHOLE)


@dataclass
class Candidates:
    """The number of ranks, and `shards(value, dim)`: the shards worth trying for a dim of a new value."""

    size: int
    shards: Callable[[Value, int], list[Shard]] = field(default=lambda value, dim: [])


Given = Mapping[Value, Shard]
"""The shards in which values are available."""
Rule = Callable[[Node, Given, Candidates], Iterator[OpStrategy]]


def even(value: Value, dim: int, candidates: Candidates) -> list[Shard]:
    """The dim sharded in even consecutive runs, as a list of one; empty where the dim is shorter than the number of ranks."""
    return [Shard(dim, split_along((value.shape[dim],), 0, candidates.size))] if value.shape[dim] >= candidates.size else []
