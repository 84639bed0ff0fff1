"""Max and average pooling through windows, forward and backward, in 1 to 3 dims.

Each tile is pooled by torch's own operation.  What depends on the whole is corrected afterwards: indices of a max refer to the
whole plane, and the divisor of an average at the image's border counts the whole's window.  1-D pooling is 2-D with one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import Box, full_box, is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.window import Spread, Window, per_dim, window_count
from widefield.rules import Additive, LocalBoxes, Meta, Read, Tile, Windowed, case, rule

aten = torch.ops.aten


def _windows(image: Meta, dims: int, size, stride, padding, dilation, ceil_mode: bool) -> list[Window]:
    """One Window per image dim; ValueError where torch refuses, too."""
    size, padding, dilation = per_dim(size, dims), per_dim(padding, dims), per_dim(dilation, dims)
    stride = per_dim(stride, dims) if stride else size
    windows = []
    for extent, k, s, p, d in zip(image.shape[-dims:], size, stride, padding, dilation, strict=True):
        count = window_count(extent, size=k, stride=s, padding=p, dilation=d, ceil_mode=ceil_mode)
        window = Window(k, s, d, p, extent, count)
        if count < 1 or 2 * p > k:
            raise ValueError(
                f"a pooling window reaching {window.span} px (size {k}, dilation {d}) does not fit {extent} px with {p} px of "
                "padding per side; padding may be at most half a window; use a larger image, a smaller window, or other padding"
            )
        windows.append(window)
    return windows


def reach_of(meta: Meta, of_dims: Sequence) -> dict:
    """The `reach` of a Read: `of_dims` are those of the tensor's last dims."""
    return {meta.ndim - len(of_dims) + n: reach for n, reach in enumerate(of_dims)}


def pooled_shape(image: Meta, counts: Sequence[int]) -> tuple[int, ...]:
    return (*image.shape[: image.ndim - len(counts)], *counts)


# ---------------------------------------------------------------------------------------------- windows on a box


class _Fit(NamedTuple):
    """Arguments with which torch computes the wanted windows of one dim of a box."""

    padding: int
    extra: tuple[int, int]
    """Pixels to pad before and after the box, ahead of the call; negative crops."""
    front: int
    """How many of the first results to drop."""
    overhang: bool
    """Whether the last window reaches past the padding, and so needs ceil_mode."""

    @classmethod
    def of(cls, window: Window, read: Interval, write: Interval, *, holds_a_window: bool = False) -> _Fit:
        """holds_a_window: a box that is smaller than a window is padded ahead, for `avg_pool3d` refuses it."""
        needed = window.input_read_by(write)
        before, after = read.start - needed.start, needed.stop - read.stop
        if holds_a_window and len(read) < window.span:
            return cls(0, (before, after), 0, False)
        half, stride = window.size // 2, window.stride  # torch's padding is at most half a window
        # Less than `most` is what ceil_mode's last window, which must meet the box, may overhang.
        most = stride if after < window.span else 1
        inside = before if before <= half else 0
        more = max(0, -(-(after - inside - most + 1) // stride))
        front = more if inside + more * stride <= half else 0
        padding = inside + front * stride
        behind = after - padding if after - padding >= most else 0
        return cls(padding, (before - inside, behind), front, 0 < after - padding - behind)


class _Fitted:
    """Torch's pooling of a box: `before` pads the box, other attributes are torch's arguments, `after` crops the results."""

    def __init__(self, windows: list[Window], read: Box, write: Box, *, holds_a_window: bool = False) -> None:
        dims = len(windows)
        each = zip(windows, read[-dims:], write[-dims:], strict=True)
        fits = [_Fit.of(*both, holds_a_window=holds_a_window) for both in each]
        self.size = [w.size for w in windows]
        self.stride = [w.stride for w in windows]
        self.dilation = [w.dilation for w in windows]
        self.padding = [fit.padding for fit in fits]
        self.ceil_mode = any(fit.overhang for fit in fits)
        self.extra = [n for fit in reversed(fits) for n in fit.extra] if any(any(fit.extra) for fit in fits) else None
        self.frame = [Interval(r.start - f.extra[0], r.stop + f.extra[1]) for r, f in zip(read[-dims:], fits, strict=True)]
        self.crop = self._crop(windows, fits, write[-dims:])

    def _crop(self, windows: list[Window], fits: list[_Fit], write: Box) -> tuple | None:
        found = [
            window_count(
                len(pixels), size=w.size, stride=w.stride, padding=fit.padding, dilation=w.dilation, ceil_mode=self.ceil_mode
            )
            for w, fit, pixels in zip(windows, fits, self.frame, strict=True)
        ]
        if found == [len(interval) for interval in write]:
            return None
        return (..., *(slice(fit.front, fit.front + len(to)) for fit, to in zip(fits, write, strict=True)))

    def before(self, tile: Tensor, value: float) -> Tensor:
        return tile if self.extra is None else F.pad(tile, self.extra, value=value)

    def after(self, pooled: Tensor) -> Tensor:
        return pooled if self.crop is None else pooled[self.crop]


class _Frame(NamedTuple):
    """One dim of the box that torch's backward runs on: `pixels`, padded by `padding`, have exactly the given windows."""

    padding: int
    pixels: Interval

    @classmethod
    def of(cls, window: Window, read: Interval, write: Interval) -> _Frame:
        """For the output pixels `read` and the input pixels `write`; contains all of the image that the windows read."""
        needed = window.input_read_by(read)
        inside = needed & Interval(0, window.extent)
        padding = max(0, -needed.start)
        low = needed.stop - padding
        if inside.stop > low + window.stride - 1 or low - needed.start - padding < window.span:
            padding = 0  # else the frame would miss pixels, or be smaller than a window, which `avg_pool3d`'s backward refuses
        low = needed.stop - padding
        return cls(padding, Interval(needed.start + padding, min(max(write.stop, inside.stop, low), low + window.stride - 1)))


class _Framed:
    """The frame of the image that torch's backward runs on, and how to take the wanted box from its result."""

    def __init__(self, windows: list[Window], read: Box, write: Box) -> None:
        self.dims = len(windows)
        frames = [_Frame.of(*both) for both in zip(windows, read[-self.dims :], write[-self.dims :], strict=True)]
        self.size = [w.size for w in windows]
        self.stride = [w.stride for w in windows]
        self.dilation = [w.dilation for w in windows]
        self.padding = [frame.padding for frame in frames]
        self.frame = [frame.pixels for frame in frames]
        self.box = tuple(len(interval) for interval in self.frame)
        wanted = write[-self.dims :]
        sides = [(pixels.start - to.start, to.stop - pixels.stop) for pixels, to in zip(self.frame, wanted, strict=True)]
        self.pad = [n for pair in reversed(sides) for n in pair] if any(n > 0 for pair in sides for n in pair) else None
        self.crop = (..., *(slice(-a, len(pixels) + b) for (a, b), pixels in zip(sides, self.frame, strict=True)))
        self.fits = not any(n for pair in sides for n in pair)

    def like(self, grad: Tensor, image: Tensor) -> Tensor:
        """A tensor of the frame's size, in place of the image, of which torch's backward reads only size and memory format."""
        return image if self.fits else _blank(image, (*grad.shape[: grad.ndim - self.dims], *self.box))

    def wanted(self, out: Tensor) -> Tensor:
        if self.fits:
            return out
        return out[self.crop] if self.pad is None else F.pad(out, self.pad)


def _blank(like: Tensor, size: tuple[int, ...]) -> Tensor:
    """An uninitialized tensor in the memory format of `like`."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.ndim)
    if last is not None and like.is_contiguous(memory_format=last) and not like.is_contiguous():
        return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=last)
    return like.new_empty(size)


# ---------------------------------------------------------------------------------------------- indices


def reindexed(flat: Tensor, old_box: Sequence[Interval], new_box: Sequence[Interval], *, in_place: bool) -> Tensor:
    """Flat indices into the box `old_box` as flat indices into the box `new_box`, which count the same pixels."""
    old, new = [len(i) for i in old_box], [len(i) for i in new_box]
    rows = [(math.prod(old[n:]), (new[n] - old[n]) * math.prod(new[n + 1 :])) for n in range(1, len(old)) if new[n] != old[n]]
    first = sum((h.start - t.start) * math.prod(new[n + 1 :]) for n, (h, t) in enumerate(zip(old_box, new_box, strict=True)))
    added = [torch.div(flat, size, rounding_mode="floor").mul_(more) for size, more in rows]
    out = flat if in_place else flat.clone()
    for part in added:
        out.add_(part)
    return out.add_(first) if first else out


# ---------------------------------------------------------------------------------------------- max


def _max_pool(dims: int, image: Meta, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False) -> Windowed:
    windows = _windows(image, dims, kernel_size, stride, padding, dilation, ceil_mode)
    whole = full_box(image.shape[-dims:])
    pool = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}[dims]
    lowest = -math.inf if image.dtype.is_floating_point else torch.iinfo(image.dtype).min

    def prepare(part: LocalBoxes):
        fit = _Fitted(windows, part.reads[0], part.write)

        def run(tile: Tensor) -> tuple[Tensor, Tensor]:
            values, flat = pool(fit.before(tile, lowest), fit.size, fit.stride, fit.padding, fit.dilation, fit.ceil_mode)
            return fit.after(values), reindexed(fit.after(flat), fit.frame, whole, in_place=not values.requires_grad)

        return run

    shape = pooled_shape(image, [w.count for w in windows])
    outs = [Tile(shape), Tile(shape, dtype=torch.int64)]
    return Windowed([Read(image, reach_of(image, windows))], outs, prepare, splits=True)


def _max_pool_backward(
    dims: int, grad: Meta, image: Meta, kernel_size, stride, padding, dilation, ceil_mode, indices: Meta
) -> Windowed:
    windows = _windows(image, dims, kernel_size, stride, padding, dilation, ceil_mode)
    whole = full_box(image.shape[-dims:])
    backward = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}[dims]

    def prepare(part: LocalBoxes):
        if is_empty(part.reads[0]):
            return partial(_zeros, size=size_of(part.write))
        frame = _Framed(windows, part.reads[0], part.write)

        def run(grad: Tensor, flat: Tensor, image: Tensor) -> Tensor:
            flat = reindexed(flat, whole, frame.frame, in_place=False)
            like = frame.like(grad, image)
            return frame.wanted(backward(grad, like, frame.size, frame.stride, frame.padding, frame.dilation, False, flat))

        return run

    reach = reach_of(grad, [Spread(w) for w in windows])
    return Windowed([Read(grad, reach), Read(indices, reach), Read(image)], [Tile(image.shape, image.cuts)], prepare)


def _zeros(tile: Tensor, *others: Tensor, size: tuple[int, ...]) -> Tensor:
    """The gradient of pixels that no window reads."""
    return tile.new_zeros(size)


rule(aten.max_pool2d_with_indices.default)(partial(_max_pool, 2))
rule(aten.max_pool3d_with_indices.default)(partial(_max_pool, 3))
rule(aten.max_pool2d_with_indices_backward.default)(partial(_max_pool_backward, 2))
rule(aten.max_pool3d_with_indices_backward.default)(partial(_max_pool_backward, 3))


# ---------------------------------------------------------------------------------------------- average


class _Divisors:
    """The divisors of an average: `number`, and corrections where a window reaches past the image or its counted padding."""

    def __init__(self, windows: list[Window], count_include_pad: bool, divisor_override: int | None) -> None:
        self.windows, self.include = windows, count_include_pad
        self.is_fixed = divisor_override is not None
        self.number = divisor_override or math.prod(w.size for w in windows)

    def corrections(self, write: Box) -> list[tuple[int, int, float]]:
        """(dim, output, factor) triples: factors for the outputs in `write` that have another divisor; dims are negative."""
        if self.is_fixed:
            return []
        dims = len(self.windows)
        found = []
        for n, (window, outputs) in enumerate(zip(self.windows, write[-dims:], strict=True)):
            for o in outputs:
                pixels = self._pixels(window, o)
                if pixels != window.size:
                    found.append((n - dims, o - outputs.start, window.size / pixels))
        return found

    def _pixels(self, window: Window, output: int) -> int:
        beyond = window.padding if self.include else 0
        return len(window.input_read_by(Interval(output, output + 1)) & Interval(-beyond, window.extent + beyond))


def _correct(values: Tensor, corrections: list[tuple[int, int, float]]) -> Tensor:
    for dim, output, factor in corrections:
        values.select(dim, output).mul_(factor)
    return values


def _avg_pool(
    dims: int, image: Meta, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
) -> Windowed:
    windows = _windows(image, dims, kernel_size, stride, padding, 1, ceil_mode)
    divisors = _Divisors(windows, count_include_pad, divisor_override)
    if not image.dtype.is_floating_point:
        raise NotImplementedError(
            f"average pooling of integers ({image.dtype}) has no rule on tiles: at tile borders other sums would be rounded; "
            "use x.double(), and round the result"
        )
    pool = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}[dims]

    def prepare(part: LocalBoxes):
        fit = _Fitted(windows, part.reads[0], part.write, holds_a_window=True)
        corrections = divisors.corrections(part.write)

        def run(tile: Tensor) -> Tensor:
            tile = fit.before(tile, 0)
            out = pool(tile, fit.size, fit.stride, fit.padding, fit.ceil_mode, True, divisors.number)
            return _correct(fit.after(out), corrections)

        return run

    shape = pooled_shape(image, [w.count for w in windows])
    return Windowed([Read(image, reach_of(image, windows))], [Tile(shape)], prepare, splits=True)


def _avg_pool_backward(
    dims: int, grad: Meta, image: Meta, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
) -> Additive:
    windows = _windows(image, dims, kernel_size, stride, padding, 1, ceil_mode)
    divisors = _Divisors(windows, count_include_pad, divisor_override)
    backward = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}[dims]

    def prepare(part: LocalBoxes):
        frame = _Framed(windows, part.reads[0], part.write)
        corrections = divisors.corrections(part.reads[0])

        def run(grad: Tensor, image: Tensor) -> tuple[Tensor]:
            grad = _correct(grad.clone(), corrections) if corrections else grad
            like = frame.like(grad, image)
            out = backward(grad, like, frame.size, frame.stride, frame.padding, False, True, divisors.number)
            return (frame.wanted(out),)

        return run

    reach = reach_of(grad, [Spread(w) for w in windows])
    return Additive(Read(grad, reach), image, [Tile(image.shape)], prepare)


rule(aten.avg_pool2d.default)(partial(_avg_pool, 2))
rule(aten.avg_pool3d.default)(partial(_avg_pool, 3))
rule(aten.avg_pool2d_backward.default)(partial(_avg_pool_backward, 2))
rule(aten.avg_pool3d_backward.default)(partial(_avg_pool_backward, 3))


def ties(x: Tensor) -> Tensor:
    """x rounded, so that windows have several equal maxima; its gradient is that of x."""
    return x + (x.detach().round() - x.detach())


CASES = [
    case("max 2x2", lambda x: F.max_pool2d(x, 2), (2, 3, 18, 13)),
    case("max stem, indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 37, 23)),
    case("max 3x3, stride 1, padding 1", lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True), (2, 3, 17, 14)),
    case("max 13x13, stride 1, padding 6", lambda x: F.max_pool2d(x, 13, 1, 6), (1, 2, 19, 17)),
    case("max without padding, ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), (2, 3, 24, 18)),
    case("max with padding, ceil", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True), (2, 3, 22, 16)),
    case("max 5, stride 3, padding 2, ceil", lambda x: F.max_pool2d(x, 5, 3, 2, ceil_mode=True), (2, 2, 25, 21)),
    case("max, dilation", lambda x: F.max_pool2d(x, 3, 2, 1, 3, return_indices=True), (2, 2, 29, 21)),
    case("max, dilation and ceil", lambda x: F.max_pool2d(x, (2, 3), (3, 1), (1, 1), (4, 2), True), (1, 2, 23, 19)),
    case("max, stride above window", lambda x: F.max_pool2d(x, 2, 5, return_indices=True), (2, 3, 24, 19)),
    case("max, stride above window, padding", lambda x: F.max_pool2d(x, 2, 5, 1), (2, 3, 26, 19)),
    case("max, window as large as the image", lambda x: F.max_pool2d(x, (11, 9)), (2, 3, 11, 9)),
    case("max, ties go to the first", lambda x: F.max_pool2d(ties(x), 3, 2, 1, return_indices=True), (2, 3, 25, 23)),
    case("max without batch", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (3, 19, 17)),
    case("max 1-D", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 29)),
    case("max 3-D", lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), (2, 2, 13, 11, 9)),
    case("max 3-D, dilation and ceil", lambda x: F.max_pool3d(x, 2, 2, 1, 2, True), (1, 2, 12, 11, 9)),
    case(
        "max, channels last",
        lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 3, 2, 1, return_indices=True),
        (2, 3, 21, 17),
    ),
    case("max window does not fit", lambda x: F.max_pool2d(x, 9), (1, 2, 6, 7), refuses="(?i)does not fit"),
    case("max padding above half", lambda x: F.max_pool2d(x, 3, padding=2), (1, 2, 9, 7), refuses="half"),
    case("avg 2x2", lambda x: F.avg_pool2d(x, 2), (2, 3, 18, 13)),
    case("avg 3x3, padding 1", lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 3, 18, 13)),
    case("avg, stride 2, pad not counted", lambda x: F.avg_pool2d(x, 3, 2, 1, False, False), (2, 3, 19, 14)),
    case("avg, stride 1, pad not counted", lambda x: F.avg_pool2d(x, 5, 1, 2, False, False), (2, 3, 19, 14)),
    case("avg, ceil", lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), (2, 3, 18, 12)),
    case("avg, ceil and padding", lambda x: F.avg_pool2d(x, 3, 2, 1, True), (2, 3, 20, 14)),
    case("avg, ceil, padding not counted", lambda x: F.avg_pool2d(x, 4, 3, 2, True, False), (2, 3, 21, 15)),
    case("avg, divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, True, False, 5), (2, 3, 20, 14)),
    case("avg, stride above window", lambda x: F.avg_pool2d(x, 2, 5, 1), (2, 3, 24, 19)),
    case("avg without batch", lambda x: F.avg_pool2d(x, 3, 2, 1), (3, 20, 14)),
    case("avg of integers", lambda x: F.avg_pool2d((9 * x).long(), 3), (2, 3, 18, 13), refuses="average pooling of integers"),
    case("avg 1-D", lambda x: F.avg_pool1d(x, 4, 3, 2, True, False), (2, 3, 31)),
    case("avg 3-D", lambda x: F.avg_pool3d(x, 3, 2, 1, True), (2, 2, 12, 10, 9)),
    case("avg 3-D, pad not counted", lambda x: F.avg_pool3d(x, (3, 2, 3), 1, 1, False, False), (1, 2, 9, 8, 7)),
    case("avg window does not fit", lambda x: F.avg_pool2d(x, 9), (1, 2, 6, 7), refuses="(?i)does not fit"),
    case("lp", lambda x: F.lp_pool2d(x.abs() + 0.1, 3.0, 3, 2), (2, 3, 19, 15)),
    case("lp 1-D", lambda x: F.lp_pool1d(x.abs() + 0.1, 2.0, 3, 2), (2, 3, 19)),
    case("lp 3-D", lambda x: F.lp_pool3d(x.abs() + 0.1, 2.0, 2), (1, 2, 9, 8, 7)),
    case("fractional max", lambda x: F.fractional_max_pool2d(x, 2, 4), (1, 2, 9, 9), refuses="fractional_max_pool2d"),
]
