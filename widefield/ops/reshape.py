"""Reshape: which cuts survive when dims are merged and split, and where the others go.

A reshape falls into groups: runs of input dims and of output dims that hold the same pixels, e.g. (B, C, H, W) -> (B, C, H*W)
has the groups B -> B, C -> C and (H, W) -> H*W.  In a group the first dim is cut in runs of pixels that are whole in memory
order, so its cut survives as one of the output's first dim, where the bounds fall between that dim's steps.  So:

- a cut of a group's first dim stays; bounds that fall inside a step (H -> (H/8, 8) at 35) move to the nearest that do not;
- other cuts of a group (H, W both cut, merged) move to its first dim together;
- where that dim is too short, they move to the longest first dim of another group; where none is left, they are gathered.
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
    """Input dims and output dims that hold the same pixels.

    first, into: the first of the input's and of the output's; extent: of `first`; dims: all of the input's.
    unit: steps of `first` that make up whole steps of `into`; inner, inner_out: pixels in one step of either.
    """

    dims: tuple[int, ...]
    first: int
    into: int
    extent: int
    unit: int
    inner: int
    inner_out: int


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The smallest groups, dims of one pixel left out, of two shapes of equally many pixels, more than none.

    >>> [(g.first, g.into, g.unit) for g in groups_of((2, 3, 56, 8), (2, 3, 7, 64))]
    [(0, 0, 1), (1, 1, 1), (2, 2, 8)]
    """
    ins, outs = ([dim for dim, extent in enumerate(shape) if extent != 1] for shape in (before, after))
    groups, i, j = [], 0, 0
    while i < len(ins):
        a, b = i, j
        held, shown = before[ins[i]], after[outs[j]]
        i, j = i + 1, j + 1
        while held != shown:
            if held < shown:
                held, i = held * before[ins[i]], i + 1
            else:
                shown, j = shown * after[outs[j]], j + 1
        extent, inner, inner_out = before[ins[a]], held // before[ins[a]], shown // after[outs[b]]
        unit = inner_out // math.gcd(inner, inner_out)
        groups.append(Group(tuple(ins[a:i]), ins[a], outs[b], extent, unit, inner, inner_out))
    return groups


def _bounds(group: Group, axes: tuple[int, ...], bounds: tuple[int, ...] | None, grid: Grid) -> tuple[int, ...] | None:
    """Bounds of the group's first dim that survive, the nearest to `bounds`; None where it has too few steps for all ranks."""
    if bounds is not None and all(bound % group.unit == 0 for bound in bounds):
        return bounds
    ways = grid.num_shards(axes)
    if group.extent // group.unit < ways:
        return None
    even = even_cut(group.extent, ways, multiple=group.unit)
    if bounds is None:
        return even
    near = tuple((bound + group.unit // 2) // group.unit * group.unit for bound in bounds)
    return near if all(a < b for a, b in zip(near, near[1:], strict=False)) else even


def cuts_through(cuts: Cuts, groups: Sequence[Group], dims: tuple[int, int], grid: Grid) -> tuple[Cuts, Cuts]:
    """The cuts that the input has to have, and those of the output that follow; `dims`: how many either has."""
    chosen: dict[Group, Cut] = {}
    homeless: list[tuple[int, ...]] = []
    for group in groups:
        held = [(dim, cut) for dim in group.dims if (cut := cuts[dim]) is not None]
        if not held:
            continue
        axes = tuple(axis for _, cut in held for axis in cut.axes)
        bounds = _bounds(group, axes, held[0][1].bounds if len(held) == 1 and held[0][0] == group.first else None, grid)
        if bounds is None:
            homeless.append(axes)
        else:
            chosen[group] = Cut(axes, bounds)
    for axes in homeless:
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
    """The size with its -1 worked out."""
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
        lambda _, tile: _shown(tile, tile_shape),
        layouts=[layout_of(x.shape, before, grid)],
        is_view=is_view,
    )


def _shown(tile: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of the tile, or of a copy without gaps where only those are in the way: all ranks' tiles then lie in one order."""
    if 0 in tile.shape:
        return tile.reshape(shape)
    order = sorted(range(tile.ndim), key=lambda dim: -tile.stride(dim))
    for shown in (tile, torch.empty_permuted(tile.shape, order, dtype=tile.dtype, device=tile.device)):
        try:
            view = shown.view(shape)
        except RuntimeError:
            continue
        if shown is not tile:
            shown.copy_(tile)
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
    """With a gradient that differs from pixel to pixel."""
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
