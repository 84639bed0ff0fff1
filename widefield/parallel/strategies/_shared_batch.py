"""Copies of a model that share a batch: a copy's samples become its rows of the batch, and results for them come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.geometry.layout import Cut, Grid, Layout, layout_of
from widefield.geometry.strides import strides_like
from widefield.tiled.api import cut_by
from widefield.tiled.partial_gradient import full_value
from widefield.tiled.redistribute import is_dense, to_layout
from widefield.tiled.tensor import TiledTensor, wrap, wrap_view


@dataclass(frozen=True)
class BatchShare:
    """Which rows of a batch each copy has.

    grid: all ranks; axis 0 are the copies, the other axes those of `tiles`, the ranks that share the images of this copy.
    bounds: copy c has the rows bounds[c] to bounds[c + 1].
    """

    grid: Grid
    tiles: Grid
    bounds: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(self.bounds) - 1

    @property
    def bounds_here(self) -> tuple[int, int]:
        """The first row of this copy, and the row behind its last."""
        copy = self.grid.index // self.tiles.size
        return self.bounds[copy], self.bounds[copy + 1]

    def of_batch(self, tensor: Tensor) -> Layout:
        """The layout, on `grid`, of the batch that a tensor of this copy's samples is a part of."""
        cuts = tensor.tile_layout.cuts[1:] if type(tensor) is TiledTensor else (None,) * (tensor.ndim - 1)
        further = [None if cut is None else Cut(tuple(axis + 1 for axis in cut.axes), cut.bounds) for cut in cuts]
        return layout_of((self.bounds[-1], *tensor.shape[1:]), (Cut((0,), self.bounds), *further), self.grid)

    def local(self, layout: Layout, count: int | None = None) -> Layout | None:
        """The layout, on `tiles`, of this copy's rows of a batch; None where a copy is one rank.

        count: the number of rows, where it is not that of `layout`.
        """
        if not self.tiles.sizes:
            return None
        cuts = [
            None if cut is None or 0 in cut.axes else Cut(tuple(axis - 1 for axis in cut.axes), cut.bounds)
            for cut in layout.cuts
        ]
        whole = [n if cut is not None else here for n, here, cut in zip(layout.shape, layout.tile_shape, cuts, strict=True)]
        return layout_of(tuple(whole) if count is None else (count, *whole[1:]), tuple(cuts), self.tiles)


def strides_of_batch(sample: Tensor, layout: Layout) -> tuple[int, ...] | None:
    """The strides of the batch in the memory format of this copy's samples; None where these are not dense."""
    return strides_like(layout.shape, sample.stride()) if is_dense(sample) else None


class EnterBatch(torch.autograd.Function):
    """Forward: this copy's samples, times a factor, as a TiledTensor of the batch.

    Losses of copies are averaged over the copies, and the batch has one loss.  So the gradient of this copy's samples is that
    of their rows times the number of copies.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: BatchShare, layout: Layout, factor: float, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        ctx.rows, ctx.layout, ctx.count, ctx.factor = rows, layout, len(tensor), factor
        local, tensor = rows.local(layout, len(tensor)), full_value(tensor)
        own = (tensor if local is None else to_layout(tensor, local))[: layout.tile_shape[0]]
        return wrap_view(own if factor == 1 else own * factor, layout, strides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows = ctx.rows
        return LeaveBatch.apply(grad, rows, ctx.layout, ctx.count, ctx.factor * rows.copies), None, None, None, None


class LeaveBatch(torch.autograd.Function):
    """Forward: this copy's rows of the batch, times a factor; zeros for the `count` samples of a dummy batch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: BatchShare, layout: Layout, count: int, factor: float) -> Tensor:
        ctx.rows, ctx.layout, ctx.factor = rows, layout, factor
        own = to_layout(full_value(tensor), layout)
        if len(own) != count:
            own = own.new_zeros(count, *own.shape[1:])
        own = own.view_as(own) if factor == 1 else own * factor
        local = rows.local(layout, count)
        return own if local is None else wrap_view(own, local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return EnterBatch.apply(grad, ctx.rows, ctx.layout, ctx.factor / ctx.rows.copies), None, None, None, None


class ReplicatedResult(torch.autograd.Function):
    """A result of the whole batch, as a mean over it, on every copy; its gradient is the mean over copies."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: BatchShare, layout: Layout | None) -> Tensor:
        ctx.rows, ctx.layout = rows, layout
        if layout is None:
            return tensor.view_as(tensor)
        own, local = to_layout(full_value(tensor), layout), rows.local(layout)
        own = own.view_as(own)
        return own if local is None else wrap_view(own, local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return MeanOverCopies.apply(grad, ctx.rows, ctx.layout), None, None


class MeanOverCopies(torch.autograd.Function):
    """The mean over copies, as a result of the whole batch; the adjoint of `ReplicatedResult`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: BatchShare, layout: Layout | None) -> Tensor:
        ctx.rows, ctx.layout = rows, layout
        local = None if layout is None else rows.local(layout)
        part = full_value(tensor) if local is None else to_layout(full_value(tensor), local)
        mean = halo.add_sums(part.contiguous(), rows.grid.group_name((0,))) / rows.copies
        return mean if layout is None else wrap(mean, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ReplicatedResult.apply(grad, ctx.rows, ctx.layout), None, None


def dims_of_samples(tensor: Tensor, each: list[int], rows: BatchShare) -> list[int]:
    """The dims of a result along which all samples of the batch may lie one after the other.

    each: for each dim, how many entries belong to one sample; 0 where none do.
    """
    pairs = zip(tensor.shape, each, strict=False)
    return [dim for dim, (extent, many) in enumerate(pairs) if many and extent == many * rows.bounds[-1]]


def leave_batch(tensor: Tensor, rows: BatchShare, count: int, each: list[int] | None) -> Tensor:
    """This copy's part of a result of the batch.

    count: the number of this copy's samples, those of a dummy batch too.
    each: see `dims_of_samples`; None where it is not known: then a result cut over copies along dim 0 has samples there.
    """
    dim = next(iter(dims_of_samples(tensor, each or [], rows)), None)
    if dim:
        return _leave_first_dim(tensor.movedim(dim, 0), rows, count, each[dim]).movedim(0, dim)  # type: ignore[index]
    return _leave_first_dim(tensor, rows, count, None if each is None else 0 if dim is None else each[0])


def _leave_first_dim(tensor: Tensor, rows: BatchShare, count: int, each: int | None) -> Tensor:
    """`leave_batch` where samples lie along dim 0.  each: how many rows belong to a sample, 0 where dim 0 holds no samples."""
    by_samples = Cut((0,), tuple(bound * each for bound in rows.bounds)) if each else None
    if type(tensor) is not TiledTensor:  # the forward made it without samples, or wrote samples into a plain tensor
        if by_samples is None:
            return ReplicatedResult.apply(tensor, rows, None) if tensor.requires_grad else tensor
        tensor = cut_by(tensor, layout_of(tuple(tensor.shape), (by_samples, *[None] * (tensor.ndim - 1)), rows.grid))
    layout = tensor.tile_layout
    first = layout.cuts[0] if layout.cuts else None
    cuts = [None if cut is not None and 0 in cut.axes else cut for cut in layout.cuts]
    if each is None and first is not None and first.axes == (0,):
        return LeaveBatch.apply(tensor, rows, layout, count, 1)
    if each and by_samples is not None:
        return LeaveBatch.apply(tensor, rows, layout_of(layout.shape, (by_samples, *cuts[1:]), layout.grid), count * each, 1)
    return ReplicatedResult.apply(tensor, rows, layout_of(layout.shape, tuple(cuts), layout.grid))
