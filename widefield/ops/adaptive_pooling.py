"""Adaptive pooling, forward and backward: an output pixel reads a bin, and the bins divide the image evenly.

Pooling to few pixels is a reduction over tiles, whose result is the same on every rank.  `adaptive_avg_pool` to one pixel
arrives as a mean, 1-D pooling as 2-D with one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import Box, full_box
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Cuts
from widefield.geometry.window import Adjoint, Bins, per_dim
from widefield.ops.pooling import pooled_shape, reach_of, reindexed, ties
from widefield.ops.unpooling import placed
from widefield.rules import LocalBoxes, Meta, Read, Reduced, Tile, Windowed, case, rule

aten = torch.ops.aten

FEW_ROWS = 4
"""An output with fewer rows per tile than this is computed as a reduction over tiles."""

Ranges = list[list[tuple[int, int]]]
"""Per dim and per output: where its bin starts and stops in a box, in pixels of the box."""


def _bins(image: Meta, dims: int, output_size) -> list[Bins]:
    counts = per_dim(output_size, dims)
    bins = [Bins(extent, count) for extent, count in zip(image.shape[-dims:], counts, strict=True)]
    if any(b.extent < 1 or b.count < 1 for b in bins):
        raise ValueError(f"adaptive pooling from {list(image.shape[-dims:])} to {counts} px: every size must be at least 1")
    return bins


def _gives_few(image: Meta, bins: list[Bins]) -> bool:
    cuts = image.cuts[-len(bins) :]
    return any(cut is not None and b.count < FEW_ROWS * (len(cut.bounds) - 1) for cut, b in zip(cuts, bins, strict=True))


def _ranges(bins: list[Bins], read: Box, write: Sequence[Interval]) -> Ranges:
    """The part of each output's bin that lies in the box `read`; (0, 0) for none."""
    found: Ranges = []
    for b, pixels, outputs in zip(bins, read[-len(bins) :], write, strict=True):
        parts = [b.input_read_by(Interval(o, o + 1)) & pixels for o in outputs]
        found.append([(p.start - pixels.start, p.stop - pixels.start) if len(p) else (0, 0) for p in parts])
    return found


def _is_plain(ranges: Ranges, read: Box) -> bool:
    """Whether torch's adaptive pooling of the box alone would have these bins."""
    for found, pixels in zip(ranges, read[-len(ranges) :], strict=True):
        of_box = Bins(len(pixels), len(found))
        if any((i := of_box.input_read_by(Interval(o, o + 1)), (i.start, i.stop))[1] != pair for o, pair in enumerate(found)):
            return False
    return True


def _uncut_last(image: Meta, counts: Sequence[int]) -> tuple[tuple[int, ...], Cuts]:
    """Shape and cuts of a result of `counts` pixels on the last dims, which are uncut."""
    lead = image.ndim - len(counts)
    return (*image.shape[:lead], *counts), (*image.cuts[:lead], *[None] * len(counts))


def _sums(tile: Tensor, ranges: Ranges) -> Tensor:
    """The sums over the ranges, one dim after another; in float32 at least."""
    out = tile if tile.dtype in (torch.float32, torch.float64) else tile.float()
    for dim, found in zip(range(-len(ranges), 0), ranges, strict=True):
        out = torch.cat([out.narrow(dim, a, b - a).sum(dim, keepdim=True) for a, b in found], dim)
    return out


def _over(sums: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """The sums divided by the sizes of their bins, one dim after another, as torch's kernels divide."""
    for n, of_dim in enumerate(sizes, 1):
        is_even = len(set(of_dim)) == 1  # a Python number needs no tensor on the device
        sums = sums / (of_dim[0] if is_even else sums.new_tensor(of_dim).view(-1, *[1] * (len(sizes) - n)))
    return sums


def _sizes(bins: list[Bins], write: Sequence[Interval]) -> list[list[int]]:
    return [[len(b.input_read_by(Interval(o, o + 1))) for o in outputs] for b, outputs in zip(bins, write, strict=True)]


def _adaptive_avg_pool(dims: int, image: Meta, output_size) -> Windowed | Reduced:
    bins = _bins(image, dims, output_size)
    counts = [b.count for b in bins]
    if _gives_few(image, bins):
        return _summed_avg(image, bins)
    pool = {2: aten._adaptive_avg_pool2d.default, 3: aten._adaptive_avg_pool3d.default}[dims]

    def prepare(part: LocalBoxes):
        read, write = part.reads[0], part.write[-dims:]
        ranges, sizes, size = _ranges(bins, read, write), _sizes(bins, write), [len(i) for i in write]
        if _is_plain(ranges, read):
            return lambda tile: pool(tile, size)
        return lambda tile: _over(_sums(tile, ranges), sizes).to(tile.dtype)

    return Windowed([Read(image, reach_of(image, bins))], [Tile(pooled_shape(image, counts))], prepare)


def _summed_avg(image: Meta, bins: list[Bins]) -> Reduced:
    assert image.layout is not None
    dims, outputs = len(bins), full_box([b.count for b in bins])
    ranges, sizes = _ranges(bins, image.layout.box, outputs), _sizes(bins, outputs)
    shape, cuts = _uncut_last(image, [b.count for b in bins])
    return Reduced(
        [image],
        range(image.ndim - dims, image.ndim),
        lambda tile: _sums(tile, ranges),
        [Tile(shape, cuts)],
        finish=lambda total, tile: _over(total, sizes).to(tile.dtype),
    )


def _adaptive_avg_pool_backward(dims: int, grad: Meta, image: Meta) -> Windowed:
    bins = _bins(image, dims, grad.shape[-dims:])
    backward = {2: aten._adaptive_avg_pool2d_backward.default, 3: aten._adaptive_avg_pool3d_backward.default}[dims]

    def prepare(part: LocalBoxes):
        read, write = part.reads[0][-dims:], part.write[-dims:]
        ranges, sizes = _ranges(bins, part.write, read), _sizes(bins, read)
        full = [[b - a for a, b in found] for found in ranges] == sizes
        if full and _is_plain(ranges, part.write):
            return backward

        def run(grad: Tensor, image: Tensor) -> Tensor:
            for dim, found, of_dim, to in zip(range(-dims, 0), ranges, sizes, write, strict=True):
                grad = _spread(grad, dim, found, of_dim, len(to))
            return grad

        return run

    reads = [Read(grad, reach_of(grad, [Adjoint(b, b.extent) for b in bins])), Read(image)]
    return Windowed(reads, [Tile(image.shape, image.cuts)], prepare)


def _spread(grad: Tensor, dim: int, found: Sequence[tuple[int, int]], sizes: Sequence[int], extent: int) -> Tensor:
    """Add every output's gradient, divided by the size of its bin, to the pixels of its range; along one dim."""
    shape = list(grad.shape)
    shape[dim] = extent
    out = grad.new_zeros(shape)
    for o, ((start, stop), size) in enumerate(zip(found, sizes, strict=True)):
        out.narrow(dim, start, stop - start).add_(grad.narrow(dim, o, 1), alpha=1 / size)
    return out


rule(aten._adaptive_avg_pool2d.default)(partial(_adaptive_avg_pool, 2))
rule(aten._adaptive_avg_pool3d.default)(partial(_adaptive_avg_pool, 3))
rule(aten._adaptive_avg_pool2d_backward.default)(partial(_adaptive_avg_pool_backward, 2))
rule(aten._adaptive_avg_pool3d_backward.default)(partial(_adaptive_avg_pool_backward, 3))


def _adaptive_max_pool(dims: int, image: Meta, output_size) -> Windowed | Reduced:
    bins = _bins(image, dims, output_size)
    if _gives_few(image, bins):
        return _merged_max(image, bins)
    whole = full_box(image.shape[-dims:])
    pool = {2: aten.adaptive_max_pool2d.default, 3: aten.adaptive_max_pool3d.default}[dims]

    def prepare(part: LocalBoxes):
        read, write = part.reads[0], part.write[-dims:]
        ranges, size = _ranges(bins, read, write), [len(i) for i in write]
        if not _is_plain(ranges, read):
            return lambda tile: _max_of(tile, ranges, read[-dims:], whole)

        def run(tile: Tensor) -> tuple[Tensor, Tensor]:
            values, flat = pool(tile, size)
            return values, reindexed(flat, read[-dims:], whole, in_place=not values.requires_grad)

        return run

    shape = pooled_shape(image, [b.count for b in bins])
    return Windowed([Read(image, reach_of(image, bins))], [Tile(shape), Tile(shape, dtype=torch.int64)], prepare)


def _max_of(tile: Tensor, ranges: Ranges, read: Sequence[Interval], whole: Sequence[Interval]) -> tuple[Tensor, Tensor]:
    """The largest pixel of each range and its flat index in the whole plane; no range may be empty.

    Ranges of several lengths are padded to the longest by repeating their last pixel.  A copy is never the first maximum, so
    the index is right.
    """
    dims = len(ranges)
    longest = [max(b - a for a, b in found) for found in ranges]
    rows = [[min(a + j, b - 1) for a, b in found for j in range(k)] for found, k in zip(ranges, longest, strict=True)]
    places = [torch.tensor(of_dim, device=tile.device) for of_dim in rows]
    for dim, at in zip(range(-dims, 0), places, strict=True):
        tile = tile.index_select(dim, at)
    pool = aten.max_pool2d_with_indices.default if dims == 2 else aten.max_pool3d_with_indices.default
    values, rest = pool(tile, longest, longest)
    flat = torch.zeros_like(rest)
    for n, (at, pixels) in enumerate(zip(places, read, strict=True)):
        size = math.prod(len(of_dim) for of_dim in rows[n + 1 :])
        place = torch.div(rest, size, rounding_mode="floor")
        rest = rest - place * size
        flat = flat * len(whole[n]) + at[place] + pixels.start
    return values, flat


def _merged_max(image: Meta, bins: list[Bins]) -> Reduced:
    """Each tile gives the largest pixel of its part of every bin; of equal ones the first in the whole wins."""
    assert image.layout is not None
    dims, box = len(bins), image.layout.box
    whole = full_box(image.shape[-dims:])
    counts = [b.count for b in bins]
    met = [b.output_reading(i) for b, i in zip(bins, box[-dims:], strict=True)]
    at = (..., *(slice(i.start, max(i.start, i.stop)) for i in met))
    ranges = _ranges(bins, box, met)

    def local(tile: Tensor) -> Tensor:
        part = tile.new_empty((2, *tile.shape[: tile.ndim - dims], *counts), dtype=torch.float64)  # also exact for indices
        part[0], part[1] = -math.inf, math.inf
        if tile.numel():
            values, flat = _max_of(tile, ranges, box[-dims:], whole)
            part[0][at], part[1][at] = values.double(), flat.double()
        return part

    def merge(parts: Tensor) -> Tensor:
        values = parts[:, 0]
        is_largest = (values == values.amax(0)) | values.isnan()
        first = torch.where(is_largest, parts[:, 1], math.inf).argmin(0)
        return parts.gather(0, first.expand(1, 2, *first.shape))[0]

    shape, cuts = _uncut_last(image, counts)
    return Reduced(
        [image],
        range(image.ndim - dims, image.ndim),
        local,
        [Tile(shape, cuts), Tile(shape, cuts, dtype=torch.int64)],
        merge=merge,
        finish=lambda total, tile: (total[0].to(tile.dtype), total[1].long()),
    )


def _adaptive_max_pool_backward(dims: int, grad: Meta, image: Meta, indices: Meta) -> Windowed:
    bins = _bins(image, dims, grad.shape[-dims:])
    extents = image.shape[-dims:]

    def prepare(part: LocalBoxes):
        write = part.write[-dims:]
        return lambda grad, flat, image: placed(grad, flat, extents, write, add=True)

    reach = reach_of(grad, [Adjoint(b, b.extent) for b in bins])
    return Windowed([Read(grad, reach), Read(indices, reach), Read(image)], [Tile(image.shape, image.cuts)], prepare)


rule(aten.adaptive_max_pool2d.default)(partial(_adaptive_max_pool, 2))
rule(aten.adaptive_max_pool3d.default)(partial(_adaptive_max_pool, 3))
rule(aten.adaptive_max_pool2d_backward.default)(partial(_adaptive_max_pool_backward, 2))
rule(aten.adaptive_max_pool3d_backward.default)(partial(_adaptive_max_pool_backward, 3))


CASES = [
    case("adaptive avg to 1", lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 17, 13)),
    case("adaptive avg to 3", lambda x: F.adaptive_avg_pool2d(x, 3), (2, 3, 17, 13)),
    case("adaptive avg to (1, 2)", lambda x: F.adaptive_avg_pool2d(x, (1, 2)), (2, 3, 17, 13)),
    case("adaptive avg to half", lambda x: F.adaptive_avg_pool2d(x, (20, 18)), (2, 3, 40, 36)),
    case("adaptive avg, uneven bins", lambda x: F.adaptive_avg_pool2d(x, (17, None)), (2, 3, 41, 18)),
    case("adaptive avg to more", lambda x: F.adaptive_avg_pool2d(x, (23, 19)), (2, 3, 17, 13)),
    case("adaptive avg without batch", lambda x: F.adaptive_avg_pool2d(x, (17, 5)), (3, 40, 13)),
    case("adaptive avg 1-D", lambda x: F.adaptive_avg_pool1d(x, 16), (2, 3, 37)),
    case("adaptive avg 1-D to 3", lambda x: F.adaptive_avg_pool1d(x, 3), (2, 3, 37)),
    case("adaptive avg 3-D", lambda x: F.adaptive_avg_pool3d(x, (8, 9, 5)), (1, 2, 16, 18, 7)),
    case("adaptive avg 3-D to 2", lambda x: F.adaptive_avg_pool3d(x, 2), (1, 2, 11, 9, 7)),
    case("adaptive max to 1", lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True), (2, 3, 17, 13)),
    case("adaptive max to 3", lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), (2, 3, 17, 13)),
    case("adaptive max to half", lambda x: F.adaptive_max_pool2d(x, (20, 18), return_indices=True), (2, 3, 40, 36)),
    case("adaptive max, uneven bins", lambda x: F.adaptive_max_pool2d(x, (17, 16), return_indices=True), (2, 3, 41, 39)),
    case("adaptive max to more", lambda x: F.adaptive_max_pool2d(x, (23, 19), return_indices=True), (2, 3, 17, 13)),
    case(
        "adaptive max, ties go to the first", lambda x: F.adaptive_max_pool2d(ties(x), 2, return_indices=True), (2, 3, 25, 23)
    ),
    case("adaptive max, many ties", lambda x: F.adaptive_max_pool2d(ties(x), 17, return_indices=True), (2, 3, 41, 37)),
    case("adaptive max without batch", lambda x: F.adaptive_max_pool2d(x, (17, 5), return_indices=True), (3, 40, 13)),
    case("adaptive max 1-D", lambda x: F.adaptive_max_pool1d(x, 16, return_indices=True), (2, 3, 37)),
    case("adaptive max 3-D", lambda x: F.adaptive_max_pool3d(x, (8, 9, 5), return_indices=True), (1, 2, 16, 18, 7)),
    case("adaptive max 3-D to 2", lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True), (1, 2, 11, 9, 7)),
    case("to nothing", lambda x: F.adaptive_avg_pool2d(x, 0), (1, 2, 9, 7), refuses="at least 1"),
]
