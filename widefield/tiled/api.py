"""Conversions between plain and tiled tensors: `tile`, `from_tile`, `whole` and the like.  All are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.mesh import Mesh
from widefield.geometry.interval import natural_cut
from widefield.geometry.layout import Cut, Layout, layout_of, uncut
from widefield.private_torch.dispatcher import ends_graphs
from widefield.tiled.dispatch import prepare
from widefield.tiled.partial_gradient import full_value_with_grad
from widefield.tiled.redistribute import is_dense, redistribute, space_group, to_layout
from widefield.tiled.tensor import TiledTensor, wrap, wrap_view
from widefield.tiled.view_writeback import version_of


@ends_graphs
def tile(image: Tensor, mesh: Mesh, cuts: Sequence[Sequence[int] | None] | None = None) -> Tensor:
    """Cut a tensor that all ranks of the mesh's space axes have whole; each rank keeps its tile.

    image: the whole, equal on these ranks.  Its last dims are cut, as many as `mesh.plan.space` has sizes, so images
        (B, C, H, W) and targets (B, H, W) both get H and W cut.
    cuts: boundaries for each of those dims, e.g. [[0, 35, 64], None]; None cuts nearly evenly.
    Returns a TiledTensor of the image's shape.  A tiled image is returned as it is, and so is any image on a mesh without space
    axes, so that one script runs under every plan.
    Backward: every rank gets the gradient of the whole image.
    Errors: ValueError for cuts that do not fit.
    """
    if type(image) is TiledTensor or (not mesh.grid.sizes and cuts is None):
        return image
    return _Tile.apply(image, _layout(tuple(image.shape), mesh, cuts))


@ends_graphs
def from_tile(tile: Tensor, mesh: Mesh, shape: Sequence[int], cuts: Sequence[Sequence[int] | None] | None = None) -> Tensor:
    """The tiled tensor of the tiles that the ranks already have.

    tile: this rank's tile, of the size that `window` says, in the same memory format on all ranks.
    shape: the whole's.  cuts: as for `tile`.
    Returns a TiledTensor of that shape.  Backward: `tile.grad` is this tile of the single device's gradient.
    Errors: ValueError for a tile of another size, and for cuts that do not fit.
    """
    if not mesh.grid.sizes and cuts is None and tile.shape == torch.Size(shape):
        return tile
    layout = _layout(tuple(shape), mesh, cuts)
    if tuple(tile.shape) != layout.tile_shape:
        raise ValueError(
            f"rank {mesh.rank} holds a tile of {tuple(tile.shape)} px and its part of {tuple(shape)} is {layout.tile_shape} "
            f"({layout}); read the window that widefield.window(shape, mesh, cuts) gives"
        )
    return _FromTile.apply(tile, layout)


def whole(tensor: Any) -> Any:
    """All pixels of a tiled tensor, as a plain tensor on every rank; a plain tensor is returned as it is.

    tensor: a tensor, or lists, tuples and dicts of tensors.
    Cost: every rank receives all pixels that it does not have.
    Backward: the mean over ranks of their gradients, cut into tiles.
    """
    tensor = full_value_with_grad(tensor)
    if type(tensor) is TiledTensor:
        return _Whole.apply(tensor)
    if isinstance(tensor, dict):
        return {key: whole(value) for key, value in tensor.items()}
    if isinstance(tensor, (list, tuple)):
        values = [whole(value) for value in tensor]
        return type(tensor)(*values) if hasattr(tensor, "_fields") else type(tensor)(values)
    return tensor


def window(shape: Sequence[int], mesh: Mesh, cuts: Sequence[Sequence[int] | None] | None = None) -> tuple[slice, ...]:
    """This rank's tile of a tensor of `shape`, as an index: one slice per dim.  cuts: as for `tile`."""
    return tuple(slice(i.start, i.stop) for i in _layout(tuple(shape), mesh, cuts).box)


def tile_of(tensor: Tensor, mesh: Mesh, *, scale: int = 1) -> Tensor:
    """This rank's tile of a tensor, as `window` says, plain and detached; a plain tensor is returned as it is.

    scale: how many of its pixels a pixel of the images is, along each dim, where these are cut as `window` says.
    """
    if type(tensor) is not TiledTensor:
        return tensor
    extents = tensor.shape[tensor.ndim - len(mesh.grid.sizes) :]
    cuts = [
        [scale * at for at in natural_cut(extent // scale, size)] for extent, size in zip(extents, mesh.grid.sizes, strict=True)
    ]
    return to_layout(tensor.detach(), _layout(tuple(tensor.shape), mesh, cuts))


@ends_graphs
def as_tile(tile: Tensor, layout: Layout) -> TiledTensor:
    """The tiled tensor by `layout` whose tile on this rank is `tile`.  Backward: `tile` gets its tile of the gradient."""
    prepare()
    return _FromTile.apply(tile, layout)


@ends_graphs
def cut_by(image: Tensor, layout: Layout) -> TiledTensor:
    """A plain tensor, the same on every rank, cut by `layout`.  Backward: every rank gets the gradient of all of it."""
    prepare()
    return _Tile.apply(image, layout)


def own_tile(tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's tile of a tiled tensor by `layout`, plain.  Backward: its gradient is that tile of the tensor's."""
    return _OwnTile.apply(tensor, layout)


def _layout(shape: tuple[int, ...], mesh: Mesh, cuts: Sequence[Sequence[int] | None] | None) -> Layout:
    prepare()
    grid, dims = mesh.grid, len(mesh.grid.sizes)
    if not dims:
        raise ValueError("the mesh has no space axis to cut an image over; build it with space=(2, 1) or the like")
    if dims == 1 and len(shape) > 3:
        raise ValueError(
            f"mesh.space={list(grid.sizes)} has one size and a tensor of shape {shape} has more dims to cut; give a size for "
            f"each dim of the image, as {[grid.size, *[1] * (len(shape) - 3)]}"
        )
    if len(shape) < dims:
        raise ValueError(f"a tensor of shape {shape} has fewer dims than the {dims} space axes {grid.sizes}")
    if cuts is not None and len(cuts) != dims:
        raise ValueError(f"{len(cuts)} cuts were given for the {dims} space axes {grid.sizes}; give one, or None, for each")
    chosen: list[Cut | None] = [None] * len(shape)
    for axis, size in enumerate(grid.sizes):
        dim = len(shape) - dims + axis
        bounds = None if cuts is None else cuts[axis]
        chosen[dim] = Cut((axis,), natural_cut(shape[dim], size) if bounds is None else _checked(bounds, shape[dim], size, dim))
    return layout_of(shape, tuple(chosen), grid)


def _checked(bounds: Sequence[int], extent: int, parts: int, dim: int) -> tuple[int, ...]:
    bounds = tuple(int(b) for b in bounds)
    rises = all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))
    if len(bounds) != parts + 1 or bounds[0] != 0 or bounds[-1] != extent or not rises:
        raise ValueError(
            f"the cut {list(bounds)} of dim {dim} does not fit: {extent} px in {parts} tiles want {parts + 1} rising "
            f"boundaries from 0 to {extent}"
        )
    return bounds


# Backwards call such functions, too, so that gradients can be differentiated.


class _Tile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        part = image[tuple(slice(i.start, i.stop) for i in layout.box)]
        part = part.clone() if layout.is_cut else part.view_as(part)  # memory of its own, in the whole's format
        return wrap_view(part, layout, image.stride() if is_dense(image) else None)  # thin tiles would not show them

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return whole(grad), None


class _FromTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tile: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return wrap(tile.view_as(tile), layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = full_value_with_grad(grad)
        return own_tile(grad, ctx.layout) if type(grad) is TiledTensor else to_layout(grad, ctx.layout), None


class _OwnTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: TiledTensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return _redistribute(tensor, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return as_tile(grad, ctx.layout), None


class _Moved(torch.autograd.Function):
    """A tiled tensor, redistributed to another layout."""

    @staticmethod
    def forward(ctx: Any, tensor: TiledTensor, layout: Layout) -> Tensor:
        ctx.layout = tensor.tile_layout
        return wrap(_redistribute(tensor, layout), layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _tiled(grad, ctx.layout), None


def _redistribute(tensor: TiledTensor, layout: Layout) -> Tensor:
    """This rank's tile by another layout, as a new tensor; a view that is a copy is refreshed first."""
    if tensor.writeback is not None:
        tensor.writeback.refresh(version_of(tensor))
    value = redistribute(tensor, layout)
    return value.view_as(value) if value is tensor.local else value


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: TiledTensor) -> Tensor:
        ctx.layout = tensor.tile_layout
        return _redistribute(tensor, uncut(tensor.tile_layout.shape, tensor.tile_layout.grid))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _tiled(grad, ctx.layout)


def _tiled(grad: Tensor, layout: Layout) -> Tensor:
    """A tiled, plain or partial gradient, as a tiled one by `layout`."""
    grad = full_value_with_grad(grad)
    return _Moved.apply(grad, layout) if type(grad) is TiledTensor else _MeanOfTiles.apply(grad, layout)


class _MeanOfTiles(torch.autograd.Function):
    """The mean of the ranks' plain gradients, cut.  Ranks may use a plain value differently; the true gradient is the mean."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, layout: Layout) -> Tensor:
        if layout.grid.size == 1:
            return wrap(to_layout(grad, layout).view_as(grad), layout)
        summed = halo.add_sums(grad, space_group(layout.grid)) / layout.grid.size
        return wrap(to_layout(summed, layout), layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return whole(grad), None
