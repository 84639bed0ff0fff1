"""Collectives over the channel axis, each with its adjoint as backward.

They convert between the placements of op_strategy.py:

    CopyToRanks      whole -> whole with a partial gradient; backward ReduceFromRanks
    ReduceFromRanks  partial -> whole; backward CopyToRanks
    ScatterToRanks   whole -> shard; backward GatherFromRanks
    GatherFromRanks  shard -> whole; backward ScatterToRanks

Tensors may be tiled in space as well: then each rank exchanges its tile's channels.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm import collectives
from widefield.geometry.layout import layout_of, uncut
from widefield.tensor_parallel.placement import Shard
from widefield.tiled.gather_watch import note_gathered
from widefield.tiled.partial_gradient import PartialGradient, full_value, partial_of
from widefield.tiled.redistribute import inverse, to_layout, whole_of
from widefield.tiled.tensor import TiledTensor, wrap


@dataclass(frozen=True, eq=False)
class Ranks:
    """The channel axis: this rank's coordinate, the number of ranks, and their process group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class Exchange:
    """Conversions between a full tensor and its shards.

    order: the dims of the results, from the outermost in memory to the innermost; None: row-major.
    """

    part: Shard
    ranks: Ranks
    order: tuple[int, ...] | None = None

    @cached_property
    def _positions(self) -> Tensor | None:
        """The position of each index of the full dim in the concatenation of all shards; None where that is in order."""
        return None if self.part.is_in_order else torch.from_numpy(self.part.order)

    @cached_property
    def _own_indices(self) -> Tensor | slice:
        indices = self.part.indices[self.ranks.rank]
        first, last = int(indices[0]), int(indices[-1])
        return slice(first, last + 1) if last - first + 1 == len(indices) else torch.from_numpy(indices)

    def take_shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of a full tensor, contiguous in `order`; sends nothing."""
        dim, own = self.part.dim, self._own_indices
        if isinstance(own, slice):
            return _in_memory_order(whole.narrow(dim, own.start, own.stop - own.start), self.order)
        return _in_memory_order(whole.index_select(dim, own.to(whole.device)), self.order)

    def gather(self, own: Tensor) -> Tensor:
        """The full tensor, by an all-gather of every rank's shard (padded to the largest)."""
        dim, counts = self.part.dim, [len(indices) for indices in self.part.indices]
        most = max(counts)
        padded = own.movedim(dim, 0).contiguous()
        if len(padded) < most:
            padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
        gathered = padded.new_empty(self.ranks.size * most, *padded.shape[1:])
        collectives.all_gather_single(gathered, padded, group=self.ranks.group)
        if min(counts) < most:
            gathered = torch.cat([gathered[n * most : n * most + count] for n, count in enumerate(counts)])
        if self._positions is not None:
            gathered = gathered.index_select(0, self._positions.to(gathered.device))
        return _in_memory_order(gathered.movedim(0, dim), self.order)


@dataclass(frozen=True, eq=False)
class Reduction:
    """An all-reduce of tensors in the same memory `order`: a layer with one channel on a rank may give another order there."""

    ranks: Ranks
    order: tuple[int, ...] | None = None

    def all_reduce(self, own: Tensor) -> Tensor:
        """The sum over the ranks, as a new tensor."""
        order = self.order or tuple(range(own.ndim))
        total = own.detach().permute(order).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.ranks.group)
        return total.permute(inverse(order))


def _in_memory_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    return tensor.contiguous() if order is None else tensor.permute(order).contiguous().permute(inverse(order))


# ---------------------------------------------------------------------------------------------- with tiles in space


def _tile_of(tensor: Tensor) -> Tensor:
    """A tensor's local tile; of a PartialGradient its part, since everything done with it here is linear."""
    if type(tensor) is PartialGradient:
        return tensor.part
    return tensor.local if type(tensor) is TiledTensor else tensor


def _whole_along(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with `dim` uncut: a model may make channels of pixels, which are cut into tiles."""
    if type(tensor) is not TiledTensor or tensor.tile_layout.cuts[dim] is None:
        return tensor
    note_gathered(tensor, "channels", "its channels are made of pixels that lie in tiles")
    cuts = (*tensor.tile_layout.cuts[:dim], None, *tensor.tile_layout.cuts[dim + 1 :])
    layout = layout_of(tuple(tensor.shape), cuts, tensor.tile_layout.grid)
    return wrap(to_layout(tensor, layout), layout)


def _like(tile: Tensor, tensor: Tensor, part: Shard | None) -> Tensor:
    """`tile`, wrapped as `tensor` is.  part: the shard that the tile has of the channels; None for all."""
    if type(tensor) is PartialGradient:
        return partial_of(tile, tensor.grid)
    if type(tensor) is not TiledTensor:
        return tile
    shape = list(tensor.shape)
    if part is not None:
        shape[part.dim] = tile.shape[part.dim]
    return wrap(tile, layout_of(tuple(shape), tensor.tile_layout.cuts, tensor.tile_layout.grid))


def _on_equal_cuts(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The tensor with the same tile on all ranks of the channel axis; they compare their cuts by a small all-gather.

    The cuts can depend on the number of channels of a rank, as after a view that joins channels with pixels.  Where they
    differ, the tensor is gathered and is no longer cut.
    """
    if type(tensor) not in (TiledTensor, PartialGradient) or ranks.size == 1 or _tile_of(tensor).is_meta:
        return tensor
    cuts = tensor.tile_layout.cuts if type(tensor) is TiledTensor else ()
    mine = torch.tensor([zlib.crc32(f"{type(tensor).__name__} {cuts}".encode())], device=_tile_of(tensor).device)
    hashes = mine.new_empty(ranks.size)
    collectives.all_gather_single(hashes, mine, group=ranks.group)
    if bool((hashes == mine).all()):
        return tensor
    tensor = full_value(tensor)
    note_gathered(tensor, "channels", "the ranks that share its channels cut its pixels at other places")
    return wrap(whole_of(tensor), uncut(tuple(tensor.shape), tensor.tile_layout.grid))


def _scatter(tensor: Tensor, exchange: Exchange) -> Tensor:
    """This rank's shard of a full tensor, which may be tiled."""
    tensor = _whole_along(tensor, exchange.part.dim)
    return _like(exchange.take_shard(_tile_of(tensor)), tensor, exchange.part)


def _gather(tensor: Tensor, exchange: Exchange) -> Tensor:
    """The full tensor from every rank's shard, which may be tiled."""
    tensor = _on_equal_cuts(_whole_along(tensor, exchange.part.dim), exchange.ranks)
    return _like(exchange.gather(_tile_of(tensor)), tensor, exchange.part)


# ---------------------------------------------------------------------------------------------- with gradients


class CopyToRanks(torch.autograd.Function):
    """The identity; backward all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ReduceFromRanks.apply(grad, ctx.reduction), None


class ReduceFromRanks(torch.autograd.Function):
    """All-reduces partial sums; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction, tensor = reduction, _on_equal_cuts(tensor, reduction.ranks)
        return _like(reduction.all_reduce(_tile_of(tensor)), tensor, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return CopyToRanks.apply(grad, ctx.reduction), None


class ScatterToRanks(torch.autograd.Function):
    """Takes this rank's shard; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _scatter(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return GatherFromRanks.apply(grad, ctx.exchange), None


class GatherFromRanks(torch.autograd.Function):
    """All-gathers the shards; backward takes this rank's shard of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _gather(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ScatterToRanks.apply(grad, ctx.exchange), None
