"""Slice, select, split, unbind and diagonal, their backward operations, and slice_scatter and the like.

A slice of a cut dim is cut where the tensor is, so it is a view of the tile, and in-place writes reach the tensor.  A selected
index of a cut dim is sent to every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Cut, Cuts, Layout, layout_of
from widefield.geometry.window import Window
from widefield.ops.views import view_rule
from widefield.rules import Local, Meta, case, composed, rule
from widefield.tiled.dispatch import by_rule
from widefield.tiled.overrides import BELOW, override
from widefield.tiled.redistribute import whole_of
from widefield.tiled.tensor import TiledTensor
from widefield.tiled.view_writeback import version_of

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- slices and splits


def _sliced_cut(cut: Cut | None, start: int, step: int, count: int) -> Cut | None:
    """The cut of a slice whose pixels stay on their ranks: output o is on the rank that owns pixel start + o * step."""
    if cut is None:
        return None
    inner = (min(max(-(-(bound - start) // step), 0), count) for bound in cut.bounds[1:-1])
    return Cut(cut.axes, (0, *inner, count))


def _slice_of_tile(x: Meta, out: Layout, dim: int, start: int, step: int) -> tuple[slice, ...]:
    """The index of a slice's pixels in this rank's tile."""
    first = start + out.box[dim].start * step - x.layout.box[dim].start  # type: ignore[union-attr]
    count = len(out.box[dim])
    at = slice(first, first + (count - 1) * step + 1, step) if count else slice(0, 0)
    return (slice(None),) * dim + (at,)


def _slices(x: Meta, dim: int, ranges: Sequence[range], is_list: bool) -> Local:
    outs, places = [], []
    for pixels in ranges:
        shape = (*x.shape[:dim], len(pixels), *x.shape[dim + 1 :])
        cut = _sliced_cut(x.cuts[dim], pixels.start, pixels.step, len(pixels))
        outs.append((shape, (*x.cuts[:dim], cut, *x.cuts[dim + 1 :])))
        places.append(_slice_of_tile(x, layout_of(*outs[-1], x.layout.grid), dim, pixels.start, pixels.step))  # type: ignore
    if not is_list:
        pixels = ranges[0]
        window = Window(1, pixels.step, 1, -pixels.start, x.shape[dim], len(pixels))
        return replace(view_rule(x, outs, lambda tile: tile[places[0]]), reach={dim: window})
    return view_rule(x, outs, lambda tile: [tile[place] for place in places])


@rule(aten.slice.Tensor)
def slice_(x: Meta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Local:
    dim %= x.ndim
    return _slices(x, dim, [range(*slice(start, end, step).indices(x.shape[dim]))], is_list=False)


@rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(x: Meta, sizes: Sequence[int], dim: int = 0) -> Local:
    dim %= x.ndim
    if sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"the parts {list(sizes)} have {sum(sizes)} px and dim {dim} has {x.shape[dim]}; give parts that add up to it"
        )
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return _slices(x, dim, [range(end - size, end) for end, size in zip(ends, sizes, strict=True)], is_list=True)


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(x: Meta, size: int, dim: int = 0) -> Local:
    dim %= x.ndim
    extent = x.shape[dim]
    starts = range(0, extent, size) if extent else range(1)
    return _slices(x, dim, [range(start, min(extent, start + size)) for start in starts], is_list=True)


@rule(aten.slice_backward.default)
def slice_backward(grad: Meta, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Local:
    """Zeros around the gradient, whose pixels stay on their ranks; the cut of the result follows from the gradient's."""
    dim %= grad.ndim
    extent, cut = size[dim], grad.cuts[dim]
    pixels = range(*slice(start, end, step).indices(extent))
    if cut is not None:
        inner = (min(extent, pixels.start + bound * step) for bound in cut.bounds[1:-1])
        cut = Cut(cut.axes, (0, *inner, extent))
    return _put_into_zeros(grad, tuple(size), (*grad.cuts[:dim], cut, *grad.cuts[dim + 1 :]), dim, pixels)


def _put_into_zeros(grad: Meta, shape: tuple[int, ...], cuts: Cuts, dim: int, pixels: range) -> Local:
    out = layout_of(shape, cuts, grad.layout.grid)  # type: ignore[union-attr]
    first = pixels.start + grad.layout.box[dim].start * pixels.step - out.box[dim].start  # type: ignore[union-attr]
    count = grad.layout.tile_shape[dim]  # type: ignore[union-attr]
    at = slice(first, first + (count - 1) * pixels.step + 1, pixels.step) if count else slice(0, 0)

    def run(_: Layout, tile: Tensor) -> Tensor:
        result = tile.new_zeros(out.tile_shape)
        result[(slice(None),) * dim + (at,)] = tile
        return result

    return Local([grad], lambda _: [(shape, cuts)], run)


@override("tensor_split.tensor_indices_or_sections")
def _tensor_split(keys: Any, x: Tensor, places: Tensor, dim: int = 0) -> list[Tensor]:
    """Torch's `tensor_split` at indices in a tensor, whose memory torch would read directly; a tiled one is gathered."""
    if type(places) is TiledTensor:
        return list(torch.tensor_split(x, int(places) if not places.ndim else whole_of(places).tolist(), dim))
    return aten.tensor_split.tensor_indices_or_sections.redispatch(keys & BELOW, x, places, dim)


# ---------------------------------------------------------------------------------------------- select, unbind and diagonal


@composed(aten.select.int)
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """On a cut dim, the owner sends the pixels to every rank."""
    dim, extent = dim % x.ndim, x.shape[dim]
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for dim {dim} with {extent} px")
    if x.tile_layout.cuts[dim] is None:  # type: ignore[attr-defined]
        return by_rule(_select_uncut, aten.select.int, (x, dim, index % extent), {})
    row = aten.squeeze.dim(aten.slice.Tensor(x, dim, index % extent, index % extent + 1), dim)
    row.writeback.version = version_of(x)
    return row


def _select_uncut(x: Meta, dim: int, index: int) -> Local:
    out = x.shape[:dim] + x.shape[dim + 1 :], x.cuts[:dim] + x.cuts[dim + 1 :]
    return view_rule(x, [out], lambda tile: tile.select(dim, index))


@rule(aten.select_backward.default)
def select_backward(grad: Meta, size: Sequence[int], dim: int, index: int) -> Local:
    """Zeros around the gradient; the new dim is cut along a free axis, if there is one, to save memory."""
    assert grad.layout is not None
    dim, grid, extent = dim % len(size), grad.layout.grid, size[dim]
    free = [axis for axis, ranks in enumerate(grid.sizes) if axis not in grad.layout.axes and 1 < ranks <= extent]
    cut = (
        Cut((free[0],), tuple(extent * part // grid.sizes[free[0]] for part in range(grid.sizes[free[0]] + 1)))
        if free
        else None
    )
    shape, cuts = tuple(size), (*grad.cuts[:dim], cut, *grad.cuts[dim:])
    out, at = layout_of(shape, cuts, grid), index % extent

    def run(_: Layout, tile: Tensor) -> Tensor:
        result = tile.new_zeros(out.tile_shape)
        if at in out.box[dim]:
            result.select(dim, at - out.box[dim].start).copy_(tile)
        return result

    return Local([grad], lambda _: [(shape, cuts)], run)


@rule(aten.unbind.int)
def unbind(x: Meta, dim: int = 0) -> Local:
    dim %= x.ndim

    def outs(layout: Layout) -> list:
        return [(x.shape[:dim] + x.shape[dim + 1 :], layout.cuts[:dim] + layout.cuts[dim + 1 :])] * x.shape[dim]

    return Local([x], outs, lambda _, tile: list(tile.unbind(dim)), whole=[dim], is_view=True)


@rule(aten.diagonal.default)
def diagonal(x: Meta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Local:
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    rows, columns = x.shape[dim1], x.shape[dim2]
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    left = [dim for dim in range(x.ndim) if dim not in (dim1, dim2)]

    def outs(layout: Layout) -> list:
        return [((*(x.shape[dim] for dim in left), count), (*(layout.cuts[dim] for dim in left), None))]

    return Local([x], outs, lambda _, tile: tile.diagonal(offset, dim1, dim2), whole=[dim1, dim2], is_view=True)


@composed(aten.diagonal_backward.default)
def diagonal_backward(grad: Tensor, size: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    zeros = grad.new_zeros(size)
    return aten.diagonal_scatter.default(zeros, grad, offset, dim1, dim2)


# ---------------------------------------------------------------------------------------------- slice_scatter and the like


@composed(aten.slice_scatter.default)
def slice_scatter(x: Tensor, part: Tensor, dim: int = 0, start=None, end=None, step: int = 1) -> Tensor:
    out = aten.clone.default(x)
    aten.copy_.default(aten.slice.Tensor(out, dim, start, end, step), part)
    return out


@composed(aten.select_scatter.default)
def select_scatter(x: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    out = aten.clone.default(x)
    aten.copy_.default(aten.select.int(out, dim, index), part)
    return out


@composed(aten.diagonal_scatter.default)
def diagonal_scatter(x: Tensor, part: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    out = aten.clone.default(x)
    aten.copy_.default(aten.diagonal.default(out, offset, dim1, dim2), part)
    return out


# ---------------------------------------------------------------------------------------------- cases


def _written(write: Any) -> Any:
    """A case: write to views of a tensor; the result is the tensor's square."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 1
        write(y, *others)
        return y * y

    return run


def _out_of_range(x: Tensor) -> Tensor:
    """A case: an index past the last row raises IndexError, as in torch."""
    try:
        return x.select(2, x.shape[2])
    except IndexError:
        return x * x


def _written_alternately(x: Tensor) -> list[Tensor]:
    """Two views that are copies, and their tensor, each written to while the others exist."""
    y = (x * 1).detach()
    row, column = y[:, :, 3], y[..., 2]
    row.mul_(2)
    y += 1
    row[1] -= 5
    column.mul_(3)
    return [y * 1, row.sin(), column.sin(), row[:, 1:] * 2]


_IMAGE = (2, 3, 11, 7)


def _two_slices(y: Tensor) -> None:
    rows = y[:, :, 2:9]
    rows[..., 1:5] *= 2
    rows[:, 1:] += y[:, :1, 2:9].detach()


CASES = [
    case("1-D slices", lambda x: [x[..., 3:17], x[:, :, ::3], x.transpose(1, 2).sin()], (2, 3, 19)),
    case("slice", lambda x: [x[:, 1:], x[:, :, 3:9], x[:, :, 1:-1, 2:], x[:, :, 6:], x[:, :, :2], x[:, :, -3:]], _IMAGE),
    case("slice with steps", lambda x: [x[:, :, ::2], x[:, :, 1::3, ::2], x[:, ::2], x[:, :, 1:9:4]], _IMAGE),
    case("slices meet", lambda x: x[:, :, 1:] * x[:, :, :-1] + x[:, :, 1:, 3:4], _IMAGE),
    case("crop for a skip", lambda x, y: x[:, :, 2:9, 1:6] * y, _IMAGE, (2, 3, 7, 5), tiled=(0, 1)),
    case("slice of nothing", lambda x: x[:, :, 4:4].sum() + x.sum(), _IMAGE),
    case("slice 3-D", lambda x: x[..., 1:4, ::2, 3:].sin(), (1, 2, 7, 5, 6)),
    case("split, chunk, unbind", lambda x: [*x.split(2, 1), *x.chunk(3, 2), *x.split([1, 7, 3], 2), *x.unbind(1)], _IMAGE),
    case("some parts of a split", lambda x: (a := x.chunk(3, 1))[0].sigmoid() * a[2] + x.tensor_split(3, 2)[1].sum(), _IMAGE),
    case(
        "unsafe parts",
        lambda x: [x.unsafe_chunk(2, 3)[1], x.unsafe_split(2, 1)[0], x.unsafe_split_with_sizes([4, 7], 2)[1]],
        _IMAGE,
    ),
    case(
        "split where a tensor says",
        lambda x: x.tensor_split((x[0, 0, :3, 0] * 0 + x.new_ones(3).cumsum(0)).long().detach().cpu(), 3),
        _IMAGE,
    ),
    case("unbind of a cut dim", lambda x: [part.sin() for part in x.unbind(2)], _IMAGE),
    case("select", lambda x: [x[:, 1], x[1], x[0, 2].sin(), x[..., -1]], _IMAGE),
    case("select of a cut dim", lambda x: [x[:, :, 0], x[:, :, -1].exp(), x[:, :, 5, 3], x.select(2, 7)], _IMAGE),
    case("select of rows together", lambda x: x[:, :, 3:4] * x + x[:, :, 8].unsqueeze(2), _IMAGE),
    case("diagonal", lambda x: [x.diagonal(0, 1, 2), x.diagonal(-1, 2, 3).sin(), x.diagonal(1, 0, 1)], _IMAGE),
    case(
        "scatter of parts",
        lambda x, y: x.slice_scatter(y, 2, 1, 10, 2) * x.select_scatter(y[:, :, 0], 2, 4),
        _IMAGE,
        (2, 3, 5, 7),
        tiled=(0, 1),
    ),
    case("scatter of a diagonal", lambda x, y: x.diagonal_scatter(y, 0, 1, 3), _IMAGE, (2, 11, 3)),
    case(
        "second gradients",
        lambda x: torch.autograd.grad((x[:, :, 2:9] ** 3).sum() + (x[:, :, 4] ** 3).sum(), x, create_graph=True),
        _IMAGE,
    ),
    case("written to channels", _written(lambda y: y[:, :2].add_(1).mul_(2)), _IMAGE),
    case("written to a cut dim", _written(lambda y: y[:, :, 1:5].mul_(3)), _IMAGE),
    case("written through two slices", _written(_two_slices), _IMAGE),
    case("written to a row", _written(lambda y: y[:, :, 4].fill_(0.5)), _IMAGE),
    case("written to rows", _written(lambda y: (y[:, :, 0].mul_(3), y[:, :, -1, 2:5].add_(1), y[0, :, 6].zero_())), _IMAGE),
    case("written to a pixel", _written(lambda y: y[:, :, 4, 5].mul_(3)), _IMAGE),
    case(
        "rows set",
        _written(lambda y, z: y.__setitem__((slice(None), slice(None), slice(1, None)), z)),
        _IMAGE,
        (2, 3, 10, 7),
        tiled=(0, 1),
    ),
    case(
        "rows set to plain ones",
        _written(lambda y, z: y.__setitem__((slice(None), slice(0, 2), slice(0, None, 3)), z)),
        _IMAGE,
        (2, 2, 4, 7),
    ),
    case(
        "a row set",
        _written(lambda y, z: y.__setitem__((slice(None), slice(None), 3), z[:, :, 0])),
        _IMAGE,
        _IMAGE,
        tiled=(0, 1),
    ),
    case("a channel set", _written(lambda y, z: y.__setitem__((slice(None), 0), z)), _IMAGE, (11, 7)),
    case("written after a row was seen", lambda x: (y := x * 1, v := y[:, :, 4], y.mul_(2), y.add_(1), v.sin())[-1], _IMAGE),
    case("a row and its tensor written in turn", _written_alternately, _IMAGE),
    case("written to a detached row", _written(lambda y: y[:, :, 4].detach()[1:].fill_(7)), _IMAGE),
    case("written to unbound rows", _written(lambda y: y.detach().unbind(2)[3].zero_()), _IMAGE),
    case("written, then read through a view", lambda x: (y := x * 1, v := y[:, :, 2:8], y.mul_(2), v.sin())[-1], _IMAGE),
    case("written to a view, which is used", lambda x: (y := x * 1, v := y[:, :, 2:8], v.mul_(3), v.sin())[-1], _IMAGE),
    case("one number of a cut vector", lambda x: x[3] * x + x[7], (13,)),
    case("the numbers of a cut vector", lambda x: [n * x[0] for n in x.unbind()], (13,)),
    case("written to numbers of a cut vector", _written(lambda y: (y[3].mul_(3), y[0:1].squeeze().add_(1))), (13,)),
    case("a row that is not there", _out_of_range, _IMAGE),
    case("parts that do not add up", lambda x: x.split([1, 2], 2), _IMAGE, refuses="add up|split_with_sizes"),
]
