"""The messages of ranks that share channels, each with its adjoint.

A tensor is whole (every rank has it, and its gradient is whole too), entered (every rank has it, and each brings a part of its
gradient), a part (each rank has some channels), or a sum in parts.
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
    """The ranks of a channel axis: this one's place among them, and their process group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class Exchange:
    """A part as ranks exchange it.  `fetch` gives the whole of what each has, `keep` what this rank has of a whole.

    order: the dims of what they give, from the outermost in memory to the innermost; None: row-major.
    """

    part: Shard
    ranks: Ranks
    order: tuple[int, ...] | None = None

    @cached_property
    def _places(self) -> Tensor | None:
        """Where the whole's indices are when all ranks' stand one after another."""
        return None if self.part.is_in_order else torch.from_numpy(self.part.order)

    @cached_property
    def _own(self) -> Tensor | slice:
        indices = self.part.held[self.ranks.rank]
        first, last = int(indices[0]), int(indices[-1])
        return slice(first, last + 1) if last - first + 1 == len(indices) else torch.from_numpy(indices)

    def keep(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole, in memory of its own."""
        dim, own = self.part.dim, self._own
        if isinstance(own, slice):
            return _laid(whole.narrow(dim, own.start, own.stop - own.start), self.order)
        return _laid(whole.index_select(dim, own.to(whole.device)), self.order)

    def fetch(self, own: Tensor) -> Tensor:
        """The whole, from every rank's part."""
        dim, counts = self.part.dim, [len(indices) for indices in self.part.held]
        most = max(counts)
        padded = own.movedim(dim, 0).contiguous()
        if len(padded) < most:
            padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
        gathered = padded.new_empty(self.ranks.size * most, *padded.shape[1:])
        collectives.all_gather_single(gathered, padded, group=self.ranks.group)
        if min(counts) < most:
            gathered = torch.cat([gathered[n * most : n * most + count] for n, count in enumerate(counts)])
        if self._places is not None:
            gathered = gathered.index_select(0, self._places.to(gathered.device))
        return _laid(gathered.movedim(0, dim), self.order)


@dataclass(frozen=True, eq=False)
class Sum:
    """What ranks add up, each laid out in `order` first: layers of one channel may lay out otherwise what they make."""

    ranks: Ranks
    order: tuple[int, ...] | None = None

    def total(self, own: Tensor) -> Tensor:
        """What all have together, new."""
        order = self.order or tuple(range(own.ndim))
        total = own.detach().permute(order).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.ranks.group)
        return total.permute(inverse(order))


def _laid(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    return tensor.contiguous() if order is None else tensor.permute(order).contiguous().permute(inverse(order))


# ---------------------------------------------------------------------------------------------- with tiles in space


def _tile_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: what is done with it here is linear, so a part of a gradient serves as well."""
    if type(tensor) is PartialGradient:
        return tensor.part
    return tensor.local if type(tensor) is TiledTensor else tensor


def _whole_along(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with every row of `dim` on this rank: pixels that a model makes channels of may lie in tiles."""
    if type(tensor) is not TiledTensor or tensor.tile_layout.cuts[dim] is None:
        return tensor
    note_gathered(tensor, "channels", "its channels are made of pixels that lie in tiles")
    cuts = (*tensor.tile_layout.cuts[:dim], None, *tensor.tile_layout.cuts[dim + 1 :])
    layout = layout_of(tuple(tensor.shape), cuts, tensor.tile_layout.grid)
    return wrap(to_layout(tensor, layout), layout)


def _like(tile: Tensor, tensor: Tensor, part: Shard | None) -> Tensor:
    """A tile of the kind that `tensor` is, with the channels of a whole or of this rank's part."""
    if type(tensor) is PartialGradient:
        return partial_of(tile, tensor.grid)
    if type(tensor) is not TiledTensor:
        return tile
    shape = list(tensor.shape)
    if part is not None:
        shape[part.dim] = tile.shape[part.dim]
    return wrap(tile, layout_of(tuple(shape), tensor.tile_layout.cuts, tensor.tile_layout.grid))


def _on_equal_cuts(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The tensor, of which all ranks that share channels have the same tile; one small message.

    Where a cut lies can depend on how many channels a rank has, as behind a view that joins them with pixels: then every
    tile is the whole from here on.
    """
    if type(tensor) not in (TiledTensor, PartialGradient) or ranks.size == 1 or _tile_of(tensor).is_meta:
        return tensor
    cuts = tensor.tile_layout.cuts if type(tensor) is TiledTensor else ()
    mine = torch.tensor([zlib.crc32(f"{type(tensor).__name__} {cuts}".encode())], device=_tile_of(tensor).device)
    told = mine.new_empty(ranks.size)
    collectives.all_gather_single(told, mine, group=ranks.group)
    if bool((told == mine).all()):
        return tensor
    tensor = full_value(tensor)
    note_gathered(tensor, "channels", "the ranks that share its channels cut its pixels at other places")
    return wrap(whole_of(tensor), uncut(tuple(tensor.shape), tensor.tile_layout.grid))


def _kept(tensor: Tensor, exchange: Exchange) -> Tensor:
    """This rank's part of a whole, tile by tile."""
    tensor = _whole_along(tensor, exchange.part.dim)
    return _like(exchange.keep(_tile_of(tensor)), tensor, exchange.part)


def _fetched(tensor: Tensor, exchange: Exchange) -> Tensor:
    """The whole of every rank's part, tile by tile."""
    tensor = _on_equal_cuts(_whole_along(tensor, exchange.part.dim), exchange.ranks)
    return _like(exchange.fetch(_tile_of(tensor)), tensor, exchange.part)


# ---------------------------------------------------------------------------------------------- with gradients


class CopyToRanks(torch.autograd.Function):
    """Whole to entered: nothing forward, the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, adding: Sum) -> Tensor:
        ctx.adding = adding
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ReduceFromRanks.apply(grad, ctx.adding), None


class ReduceFromRanks(torch.autograd.Function):
    """A sum in parts to the whole; the gradient of each part is the whole's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, adding: Sum) -> Tensor:
        ctx.adding, tensor = adding, _on_equal_cuts(tensor, adding.ranks)
        return _like(adding.total(_tile_of(tensor)), tensor, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return CopyToRanks.apply(grad, ctx.adding), None


class ScatterToRanks(torch.autograd.Function):
    """Whole to part; the parts' gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _kept(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return GatherFromRanks.apply(grad, ctx.exchange), None


class GatherFromRanks(torch.autograd.Function):
    """Part to whole; each rank takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _fetched(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ScatterToRanks.apply(grad, ctx.exchange), None
