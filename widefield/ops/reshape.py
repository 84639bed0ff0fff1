"""Reshape: which cuts survive when dims are merged and split, and where the others move.

A reshape falls into groups: runs of input dims and of output dims with the same pixels.  (B, C, H, W) -> (B, C, H*W) has the
groups B -> B, C -> C and (H, W) -> H*W.  A tile of a group's first dim is contiguous in row-major order.  So a cut of the
first input dim is also one of the first output dim, if its bounds fall between indices of that dim.

- A cut of a group's first dim stays.  Bounds inside an index (H -> (H/8, 8), cut at 35) move to the nearest multiple.
- Other cuts of a group (H and W are both cut, and merged) move to its first dim together.
- If that dim is too short, they move to the longest first dim of another group.  If none is left, they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, Cuts, Grid, layout_of
from widefield.rules import Local, Meta, case, rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Group:
    """Input dims and output dims with the same pixels.

    dims: the input dims; first, into: the first input dim and the first output dim; extent: that of `first`.
    inner, inner_out: the number of pixels per index of `first`, and of `into`.
    unit: bounds of a cut of `first` must be multiples of this to be bounds of `into`, too.
    """

    dims: tuple[int, ...]
    first: int
    into: int
    extent: int
    unit: int
    inner: int
    inner_out: int


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The smallest groups of a reshape; dims of extent 1 belong to none.  Both shapes have the same number of pixels, not 0.

    >>> [(g.first, g.into, g.unit) for g in groups_of((2, 3, 56, 8), (2, 3, 7, 64))]
    [(0, 0, 1), (1, 1, 1), (2, 2, 8)]
    """
    ins, outs = ([dim for dim, extent in enumerate(shape) if extent != 1] for shape in (before, after))
    groups, i, j = [], 0, 0
    while i < len(ins):
        a, b = i, j
        pixels_in, pixels_out = before[ins[i]], after[outs[j]]
        i, j = i + 1, j + 1
        while pixels_in != pixels_out:
            if pixels_in < pixels_out:
                pixels_in, i = pixels_in * before[ins[i]], i + 1
            else:
                pixels_out, j = pixels_out * after[outs[j]], j + 1
        extent, inner, inner_out = before[ins[a]], pixels_in // before[ins[a]], pixels_out // after[outs[b]]
        unit = inner_out // math.gcd(inner, inner_out)
        groups.append(Group(tuple(ins[a:i]), ins[a], outs[b], extent, unit, inner, inner_out))
    return groups


def _bounds(group: Group, axes: tuple[int, ...], bounds: tuple[int, ...] | None, grid: Grid) -> tuple[int, ...] | None:
    """Bounds of the group's first dim that survive, nearest to `bounds`; None where the dim is too short for all ranks."""
    if bounds is not None and all(bound % group.unit == 0 for bound in bounds):
        return bounds
    num_shards = grid.num_shards(axes)
    if group.extent // group.unit < num_shards:
        return None
    even = even_cut(group.extent, num_shards, multiple=group.unit)
    if bounds is None:
        return even
    near = tuple((bound + group.unit // 2) // group.unit * group.unit for bound in bounds)
    return near if all(a < b for a, b in zip(near, near[1:], strict=False)) else even


def cuts_through(cuts: Cuts, groups: Sequence[Group], dims: tuple[int, int], grid: Grid) -> tuple[Cuts, Cuts]:
    """The cuts that the input must have, and those of the output that follow; dims: how many dims input and output have."""
    chosen: dict[Group, Cut] = {}
    to_move: list[tuple[int, ...]] = []
    for group in groups:
        cut_dims = [(dim, cut) for dim in group.dims if (cut := cuts[dim]) is not None]
        if not cut_dims:
            continue
        axes = tuple(axis for _, cut in cut_dims for axis in cut.axes)
        (dim, cut), *others = cut_dims
        bounds = _bounds(group, axes, cut.bounds if not others and dim == group.first else None, grid)
        if bounds is None:
            to_move.append(axes)
        else:
            chosen[group] = Cut(axes, bounds)
    for axes in to_move:
        for group in sorted(groups, key=lambda group: -group.extent // group.unit):
            if group not in chosen and (bounds := _bounds(group, axes, None, grid)) is not None:
                chosen[group] = Cut(axes, bounds)
                break
    before: list[Cut | None] = [None] * dims[0]
    after: list[Cut | None] = [None] * dims[1]
    for group, cut in chosen.items():
        before[group.first] = cut
        after[group.into] = Cut(cut.axes, tuple(bound * group.inner // group.inner_out for bound in cut.bounds))
    return tuple(before), tuple(after)


def _full_size(size: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The size with a number in place of -1.  RuntimeError, as torch's: it does not fit."""
    pixels, known = math.prod(shape), math.prod(extent for extent in size if extent != -1)
    full = tuple((pixels // known if known else 0) if extent == -1 else extent for extent in size)
    if math.prod(full) != pixels or list(size).count(-1) > 1:
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {pixels}: {list(shape)} has {pixels} px")
    return full


def _reshaped(x: Meta, size: Sequence[int], is_view: bool) -> Local:
    assert x.layout is not None, "a view of a plain tensor is plain"
    full, grid = _full_size(size, x.shape), x.layout.grid
    groups = groups_of(x.shape, full) if 0 not in x.shape else []
    before, after = cuts_through(x.cuts, groups, (x.ndim, len(full)), grid)
    tile_shape = layout_of(full, after, grid).tile_shape
    return Local(
        [x],
        lambda _: [(full, after)],
        lambda _, tile: _view_of(tile, tile_shape),
        layouts=[layout_of(x.shape, before, grid)],
        is_view=is_view,
    )


def _view_of(tile: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of the tile; else of a copy without gaps that keeps the order of dims, as all ranks' tiles must; else a copy."""
    if 0 in tile.shape:
        return tile.reshape(shape)
    order = sorted(range(tile.ndim), key=lambda dim: -tile.stride(dim))
    for source in (tile, torch.empty_permuted(tile.shape, order, dtype=tile.dtype, device=tile.device)):
        try:
            view = source.view(shape)
        except RuntimeError:
            continue
        if source is not tile:
            source.copy_(tile)
        return view
    return tile.reshape(shape)


@rule(aten.view.default, aten._reshape_alias.default)
def view(x: Meta, size: Sequence[int], stride: Any = None) -> Local:
    return _reshaped(x, size, is_view=True)


@rule(aten._unsafe_view.default)
def unsafe_view(x: Meta, size: Sequence[int]) -> Local:
    return _reshaped(x, size, is_view=False)


# ---------------------------------------------------------------------------------------------- cases


def _windows(x: Tensor, w: int) -> Tensor:
    """(B, H, W, C) to (windows, w * w, C), as Swin does."""
    B, H, W, C = x.shape
    return x.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, C)


def _back(windows: Tensor, w: int, shape: tuple[int, ...]) -> Tensor:
    B, H, W, C = shape
    return windows.view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)


def _squared(function: Any) -> Any:
    """A case on squared pixels, whose gradient differs from pixel to pixel."""
    return lambda x, *others: function(x * x, *others)


def _written(x: Tensor) -> Tensor:
    y = x * 1
    y.view(2, 3, -1).mul_(2)
    y.view(2, -1)[:, 3:50].add_(1)
    y.view(6, 12, 7)[1, 4:6].zero_()
    return y * y


_IMAGE = (2, 3, 12, 7)

CASES = [
    case("to tokens", lambda x: (x * x).flatten(2).transpose(1, 2).exp(), _IMAGE),
    case(
        "tokens and back",
        lambda x: (t := x.flatten(2).transpose(1, 2).sin(), t.transpose(1, 2).reshape(x.shape) * x)[1],
        _IMAGE,
    ),
    case("flatten for a head", _squared(lambda x: [x.flatten(1), x.flatten(), x.reshape(-1, 7), x.reshape(2, -1, 3)]), _IMAGE),
    case("flatten, few channels", _squared(lambda x: x.flatten(1)), (1, 1, 9, 5)),
    case("flatten and a layer", lambda x, w: F.linear(x.flatten(1), w), _IMAGE, (5, 252)),
    case("batch and channels", _squared(lambda x: x.reshape(6, 12, 7)[:, None].sin().view(2, 3, 12, 7)), _IMAGE),
    case("groups of channels", _squared(lambda x: x.view(2, 2, 3, 11, 5).transpose(1, 2).reshape(2, 6, 11, 5)), (2, 6, 11, 5)),
    case(
        "pixel shuffle by hand",
        _squared(lambda x: x.view(2, 1, 2, 2, 5, 7).permute(0, 1, 4, 2, 5, 3).reshape(2, 1, 10, 14)),
        (2, 4, 5, 7),
    ),
    case(
        "pixel unshuffle by hand",
        _squared(lambda x: x.view(2, 3, 5, 2, 3, 2).permute(0, 1, 3, 5, 2, 4).reshape(2, 12, 5, 3)),
        (2, 3, 10, 6),
    ),
    case("windows", lambda x: _windows((x * x).permute(0, 2, 3, 1), 4).sin(), (2, 3, 20, 12)),
    case(
        "windows and back", lambda x: _back(_windows((x * x).permute(0, 2, 3, 1), 4).sin(), 4, (1, 20, 12, 3)), (1, 3, 20, 12)
    ),
    case(
        "windows and back, batch",
        lambda x: _back(_windows((x * x).permute(0, 2, 3, 1), 3).sin(), 3, (2, 15, 12, 3)),
        (2, 3, 15, 12),
    ),
    case("few windows", lambda x: _windows((x * x).permute(0, 2, 3, 1), 6).sin(), (1, 3, 6, 12)),
    case("heads", lambda x: x.flatten(2).transpose(1, 2).reshape(2, 84, 3, 2, 3).permute(2, 0, 3, 1, 4).sin(), (2, 18, 12, 7)),
    case(
        "dims of one",
        _squared(lambda x: [x.view(2, 1, 3, 12, 1, 7), x.view(1, 6, 1, 12, 7, 1), x.reshape(2, 3, 12, 7, 1)]),
        _IMAGE,
    ),
    case("a cut dim of one", _squared(lambda x: [x.flatten(1), x.view(2, 15), x.view(2, 3, 5)]), (2, 3, 1, 5)),
    case("unflatten", _squared(lambda x: [x.unflatten(2, (3, 4)), x.unflatten(2, (4, 3)), x.unflatten(3, (7, 1))]), _IMAGE),
    case("3-D", _squared(lambda x: [x.flatten(2), x.flatten(3), x.view(2, 2, 2, 3, 20)]), (2, 2, 6, 5, 4)),
    case("1-D", _squared(lambda x: [x.view(2, 3, 5, 4), x.view(6, 20), x.flatten()]), (2, 3, 20)),
    case("repeat_interleave", lambda x: (x * x).repeat_interleave(2, 2).repeat_interleave(3, 1).sin(), (2, 3, 5, 7)),
    case("of a permuted tensor", _squared(lambda x: x.permute(0, 2, 3, 1).reshape(2, -1, 3).sin()), _IMAGE),
    case("of a slice", _squared(lambda x: x[:, 1:, 2:9].reshape(2, 2, -1)), _IMAGE),
    case("of nothing", lambda x: x[:, :, 3:3].reshape(2, -1, 7).sum() + x.sum(), _IMAGE),
    case("written through", _written, _IMAGE),
    case(
        "written after it was seen",
        lambda x: (y := x * 1, v := y.flatten(1), y.mul_(2), v[:, 1:].sin(), v.add_(1), y * v.view(_IMAGE))[-1],
        _IMAGE,
    ),
    case("wrong size", lambda x: x.view(5, -1), _IMAGE, refuses="invalid for input of size"),
]
