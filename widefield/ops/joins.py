"""cat, stack, flip, rot90, roll, repeat, tril and triu.

Along a cut dim, the tiles of a cat have other bounds than those of its parts: every rank reads the pixels of each part that lie
in its tile of the result.  The result keeps the bounds of its longest part, which need not move then, unless tiles would become
too uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.interval import Interval, natural_cut
from widefield.geometry.layout import Cut, Grid
from widefield.geometry.window import EMPTY
from widefield.rules import Local, LocalBoxes, Meta, Read, Tile, Windowed, case, composed, rule
from widefield.tiled.redistribute import first_cut

aten = torch.ops.aten

UNEVEN = 1.25
"""The longest tile may have this many times its even share of the pixels; else the result is cut evenly."""


@dataclass(frozen=True)
class PartOfJoin:
    """Output pixels from `start` on read a part of a cat, which is `extent` pixels long; others read nothing of it."""

    start: int
    extent: int

    def input_read_by(self, output: Interval) -> Interval:
        pixels = Interval(output.start - self.start, output.stop - self.start) & Interval(0, self.extent)
        return pixels if len(pixels) else EMPTY

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        raise AssertionError("the rule of cat computes the cut of its result")


@dataclass(frozen=True)
class Mirror:
    """Output pixel o reads input pixel extent - 1 - o."""

    extent: int

    def input_read_by(self, output: Interval) -> Interval:
        return Interval(self.extent - output.stop, self.extent - output.start) if len(output) else EMPTY

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return cut


# ---------------------------------------------------------------------------------------------- cat and stack


@rule(aten.cat.default)
def cat(tensors: Sequence[Meta], dim: int = 0) -> Windowed:
    parts = [part for part in tensors if part.shape != (0,)] or [tensors[0]]
    left_out = [part for part in tensors if part not in parts]  # torch ignores empty 1-D tensors
    dim %= parts[0].ndim
    for part in parts:
        if part.ndim != parts[0].ndim or _others(part, dim) != _others(parts[0], dim):
            raise RuntimeError(f"cat along dim {dim} wants equal sizes on the other dims, not {[list(p.shape) for p in parts]}")
    ends = [sum(part.shape[dim] for part in parts[: n + 1]) for n in range(len(parts))]
    starts = [end - part.shape[dim] for end, part in zip(ends, parts, strict=True)]
    main, grid = first_cut(parts), next(part.layout.grid for part in tensors if part.is_cut)  # type: ignore[union-attr]
    shape = (*main.shape[:dim], ends[-1], *main.shape[dim + 1 :])
    cut = _joined_cut(main.cuts[dim], parts, starts, dim, ends[-1], grid)
    reads = [Read(part, {dim: PartOfJoin(start, part.shape[dim])}) for part, start in zip(parts, starts, strict=True)]
    reads += [Read(part, {0: PartOfJoin(0, 0)}) for part in left_out]
    dtype = reduce(torch.promote_types, (part.dtype for part in tensors))

    def prepare(part: LocalBoxes) -> Any:
        read = [n for n, box in enumerate(part.reads[: len(parts)]) if len(box[dim])]
        if len(read) == len(parts) and not left_out:
            return lambda *tiles: torch.cat(tiles, dim)
        return lambda *tiles: torch.cat([tiles[n].to(dtype) for n in read], dim)

    return Windowed(reads, [Tile(shape, (*main.cuts[:dim], cut, *main.cuts[dim + 1 :]), dtype)], prepare)


def _others(part: Meta, dim: int) -> tuple[int, ...]:
    return part.shape[:dim] + part.shape[dim + 1 :]


def _joined_cut(cut: Cut | None, parts: Sequence[Meta], starts: Sequence[int], dim: int, extent: int, grid: Grid) -> Cut | None:
    """The result's cut along `dim`; None where the first part that is cut is not cut there."""
    if cut is None:
        return None
    num_shards = grid.num_shards(cut.axes)
    start, longest = max(zip(starts, parts, strict=True), key=lambda pair: pair[1].shape[dim])
    stays = longest.cuts[dim]
    if stays is not None and stays.axes == cut.axes:
        bounds = (0, *(bound + start for bound in stays.bounds[1:-1]), extent)
        if max(b - a for a, b in zip(bounds, bounds[1:], strict=False)) <= UNEVEN * -(-extent // num_shards):
            return Cut(cut.axes, bounds)
    return Cut(cut.axes, natural_cut(extent, num_shards))


@composed(aten.stack.default)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= tensors[0].ndim + 1
    return aten.cat.default([aten.unsqueeze.default(tensor, dim) for tensor in tensors], dim)


# ---------------------------------------------------------------------------------------------- flip, rot90 and roll


@rule(aten.flip.default)
def flip(x: Meta, dims: Sequence[int]) -> Windowed:
    flipped = [dim % x.ndim for dim in dims]
    reach = {dim: Mirror(x.shape[dim]) for dim in flipped}
    return Windowed([Read(x, reach)], [Tile(x.shape)], lambda part: lambda tile: tile.flip(flipped))  # type: ignore[arg-type]


@composed(aten.rot90.default)
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = dims
    if k % 4 == 2:
        return aten.flip.default(x, [a, b])
    if k % 4 == 0:
        return aten.clone.default(x, memory_format=torch.contiguous_format)
    return aten.transpose.int(aten.flip.default(x, [b if k % 4 == 1 else a]), a, b)


@composed(aten.roll.default)
def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """One dim after another: the end is put before the start by cat.  A dim that is not shifted gives a row-major copy."""
    if not dims:
        flat = aten.view.default(aten.clone.default(x, memory_format=torch.contiguous_format), [-1])
        return aten.view.default(roll(flat, shifts, [0]), x.shape)
    if not x.numel():
        return aten.clone.default(x)
    out = x
    for shift, dim in zip(shifts, dims, strict=True):
        extent = x.shape[dim]
        start = -shift % extent
        if start:
            ends = aten.slice.Tensor(out, dim, start, extent), aten.slice.Tensor(out, dim, 0, start)
            out = aten.cat.default(list(ends), dim)
        else:
            out = aten.clone.default(out, memory_format=torch.contiguous_format)
    return out


# ---------------------------------------------------------------------------------------------- repeat


@composed(aten.repeat.default)
def repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    out = x
    for _ in range(len(repeats) - x.ndim):
        out = aten.unsqueeze.default(out, 0)
    sizes = [-1] * out.ndim
    for dim, times in enumerate(repeats):
        if out.shape[dim] == 1 and out.tile_layout.cuts[dim] is None:  # type: ignore[attr-defined]
            sizes[dim] = times
        elif times == 0:
            out = aten.slice.Tensor(out, dim, 0, 0)
        elif times > 1:
            out = aten.cat.default([out] * times, dim)
    return aten.clone.default(aten.expand.default(out, sizes), memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------- tril and triu


def _triangle(function: Any) -> Any:
    """The rule of tril or triu; the diagonal is shifted by where the tile's first row and column are."""

    def keep(x: Meta, diagonal: int = 0) -> Local:
        rows, columns = x.layout.box[-2:]  # type: ignore[union-attr]
        at = diagonal + rows.start - columns.start
        counts = any(cut is not None for cut in x.cuts[-2:])
        return Local([x], lambda _: [(x.shape, x.cuts)], lambda _, tile: function(tile, at), by_position=counts)

    return keep


rule(aten.tril.default)(_triangle(aten.tril.default))
rule(aten.triu.default)(_triangle(aten.triu.default))


# ---------------------------------------------------------------------------------------------- cases

_IMAGE = (2, 3, 11, 7)
_TALL = (2, 3, 4, 7)

CASES = [
    case("cat of channels", lambda x, y: torch.cat([x, y * 2, x.sin()], 1), _IMAGE, (2, 2, 11, 7), tiled=(0, 1)),
    case("cat of batches", lambda x, y: torch.cat([x, y]) ** 2, _IMAGE, (3, 3, 11, 7), tiled=(0, 1)),
    case("cat with plain", lambda x, y: torch.cat([y, x], 1) ** 2, _IMAGE, (2, 2, 11, 7)),
    case("cat along a cut dim", lambda x, y: torch.cat([x, y], 2) ** 2, _IMAGE, _TALL, tiled=(0, 1)),
    case("cat along a cut dim, plain first", lambda x, y: torch.cat([y, x, y], 2) ** 2, _IMAGE, _TALL),
    case(
        "cat along both dims",
        lambda x, y: torch.cat([torch.cat([x, x * 2], -1), torch.cat([x, y], 3)], 2) ** 2,
        _IMAGE,
        _IMAGE,
        tiled=(0, 1),
    ),
    case("cat of other cuts", lambda x, y: torch.cat([x[:, :, 1:8], y], 1) ** 2, _IMAGE, (2, 2, 7, 7), tiled=(0, 1)),
    case("cat of crops", lambda x: torch.cat([x[:, :, 8:], x[:, :, :2], x[:, :, 3:4]], 2) ** 2, _IMAGE),
    case(
        "cat of an uncut and a cut", lambda x, y: torch.cat([x.mean(2, keepdim=True), y], 2) ** 2, _IMAGE, _IMAGE, tiled=(0, 1)
    ),
    case(
        "cat of a token", lambda x, t: torch.cat([t.expand(2, -1, -1), x.flatten(2).transpose(1, 2)], 1) ** 2, _IMAGE, (1, 1, 3)
    ),
    case("cat of one", lambda x: torch.cat([x], 2) ** 2, _IMAGE),
    case("cat with nothing", lambda x: torch.cat([torch.empty(0), x, x[:, :0]], 1) ** 2, _IMAGE),
    case(
        "cat of nothing",
        lambda x: (
            [torch.cat([x.flatten()[:0], y]) for y in (x, x.flatten()[5:5], x.sum((2, 3)))] + [torch.cat([x.flatten()[:0]])]
        ),
        _IMAGE,
    ),
    case("cat of two types", lambda x, y: torch.cat([x.detach().float(), y], 2) ** 2, _IMAGE, _TALL, tiled=(0, 1)),
    case("cat 1-D", lambda x, y: torch.cat([x, y], -1) ** 2, (2, 3, 13), (2, 3, 8), tiled=(0, 1)),
    case("cat 3-D", lambda x, y: torch.cat([x, y], 3) ** 2, (1, 2, 5, 6, 4), (1, 2, 5, 3, 4), tiled=(0, 1)),
    case(
        "cat of sizes that differ",
        lambda x, y: torch.cat([x, y], 1),
        _IMAGE,
        (2, 3, 10, 7),
        tiled=(0, 1),
        refuses="other dims|Sizes of tensors",
    ),
    case("stack", lambda x, y: [torch.stack([x, y]), torch.stack([x, y], 2) ** 2, torch.stack([y, x], -1)], _IMAGE, _IMAGE),
    case("flip", lambda x: [x.flip(2), x.flip((2, 3)).sin(), x.flip(-1), x.flip((0, 1)), x.fliplr()], _IMAGE),
    case("flip and the image", lambda x: x * x.flip(2) + x.flip(3), _IMAGE),
    case("flip 3-D", lambda x: x.flip((2, 4)).sin(), (1, 2, 5, 4, 3)),
    case("rot90", lambda x: [x.rot90(k, (2, 3)).sin() for k in range(-1, 4)], _IMAGE),
    case("roll", lambda x: [x.roll(3, 2), x.roll((-2, 5), (2, 3)).sin(), x.roll(1, 1), x.roll(0, 2), x.roll(11, 2)], _IMAGE),
    case("roll and the image", lambda x: x * x.roll((-4, -3), (2, 3)), _IMAGE),
    case("roll of all", lambda x: x.roll(9).sin(), _IMAGE),
    case("roll 1-D", lambda x: x.roll(-5, -1).sin(), (2, 3, 17)),
    case("repeat", lambda x: [x.repeat(1, 2, 1, 1), x.repeat(2, 1, 1, 3, 1).sin(), torch.tile(x, (2, 2))], (2, 3, 5, 7)),
    case("repeat of ones", lambda x: x.repeat(3, 2, 1, 4).sin(), (1, 3, 5, 1)),
    case("repeat of a cut dim of one", lambda x: x.repeat(1, 1, 5, 1).sin(), (2, 3, 1, 7)),
    case("triangles", lambda x: [x.tril(), x.triu(-2), x.tril(3).sin(), x.triu(1)], _IMAGE),
    case(
        "meshgrid of plain",
        lambda x, a, b: x * torch.meshgrid(a, b, indexing="ij")[0] + x[:, 0, 0, 0].sum(),
        _IMAGE,
        (11,),
        (7,),
    ),
]
