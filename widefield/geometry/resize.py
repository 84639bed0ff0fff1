"""Which input pixels does a pixel of a resized image read, and with which weights?  One dim at a time; no torch.

The numbers are those of torch's kernels, rounding included.  `single` means that the kernel computes coordinates in float32:
for every dtype but float64, and always in the backward of nearest.  Coordinates are always those of the whole, never a tile's.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from widefield.geometry.interval import Interval
from widefield.geometry.window import EMPTY, valid_cut

Taps = tuple[int, tuple[float, ...]]
"""The first pixel that is read, and the weights of that pixel and the following ones."""


@dataclass(frozen=True)
class Resize:
    """Output pixel o of `count` reads input pixels of `extent` around o * extent / count.

    kind: nearest, nearest-exact, linear, cubic, or with antialiasing linear-aa, cubic-aa, lanczos-aa.
    scale: the scale factor that the caller gave; torch then steps by 1 / scale and not by extent / count.
    single: coordinates are rounded to float32.

    >>> double = Resize("linear", extent=64, count=128)
    >>> double.input_read_by(Interval(70, 128)), double.cut_of((0, 35, 64)), double.taps(70), double.taps(0)
    (Interval(start=34, stop=64), (0, 70, 128), (34, (0.25, 0.75)), (0, (1.0, 0.0)))
    """

    kind: str
    extent: int
    count: int
    scale: float | None = None
    align_corners: bool = False
    single: bool = False

    def input_read_by(self, output: Interval) -> Interval:
        if len(output) == 0:
            return EMPTY
        return Interval(self._starts[output.start], self._stops[output.stop - 1])

    def output_reading(self, pixels: Interval) -> Interval:
        """The output pixels that read any of these."""
        if len(pixels) == 0:
            return EMPTY
        return Interval(bisect_right(self._stops, pixels.start), bisect_left(self._starts, pixels.stop))

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([bisect_left(self._centers, bound) for bound in cut], self.count)

    def taps(self, index: int) -> Taps:
        """The input pixels that output pixel `index` reads, and their weights."""
        return self._table[index]

    @cached_property
    def step(self) -> float:
        """Input pixels per output pixel."""
        if self.align_corners:
            return self._rounded((self.extent - 1) / (self.count - 1)) if self.count > 1 else 0.0
        return self._rounded(1 / self.scale if self.scale else self.extent / self.count)

    @property
    def is_odd(self) -> bool:
        """Whether some of torch's kernels copy here and others resample, so that results depend on the kernel.

        That is so where the step differs from extent / count and the size stays, or doubles for nearest.
        """
        doubles = self.kind == "nearest" and self.count == 2 * self.extent and self.step != 0.5
        return doubles or self.extent == self.count and self.step not in (0.0, 1.0)

    @property
    def is_clamped(self) -> bool:
        """Whether the last outputs of a nearest resize would read beyond the image, and read its last pixel instead.

        In the backward a CPU's kernel adds their gradients to that pixel, and a GPU's leaves them out.
        """
        at = {"nearest": 0.0, "nearest-exact": 0.5}.get(self.kind)
        return at is not None and math.floor(_single((self.count - 1 + at) * self.step)) >= self.extent

    @cached_property
    def _table(self) -> list[Taps]:
        return [_TAPS[self.kind](self, output) for output in range(self.count)]

    @cached_property
    def _starts(self) -> list[int]:
        return [first for first, _ in self._table]

    @cached_property
    def _stops(self) -> list[int]:
        return [first + len(weights) for first, weights in self._table]

    @cached_property
    def _centers(self) -> list[int]:
        """The input pixel at the center of each output pixel."""
        if self.kind == "nearest":
            return self._starts
        at = 0.0 if self.align_corners else 0.5
        return [min(int(self.step * (o + at) + 0.5 - at), self.extent - 1) for o in range(self.count)]

    def _rounded(self, number: float) -> float:
        return _single(number) if self.single else number

    def _source(self, output: int) -> float:
        """The center of an output pixel in input coordinates; 0 is the center of the first input pixel."""
        if self.align_corners:
            return self._rounded(self.step * output)
        return self._rounded(self._rounded(self.step * (output + 0.5)) - 0.5)


@dataclass(frozen=True)
class Resized:
    """The adjoint of a resize: the gradient of input pixel i is a sum over the output pixels that read it.

    >>> back = Resized(Resize("linear", extent=64, count=128))
    >>> back.input_read_by(Interval(35, 64)), back.cut_of((0, 70, 128)), back.taps(35)
    (Interval(start=69, stop=128), (0, 35, 64), (69, (0.25, 0.75, 0.75, 0.25)))
    """

    resize: Resize

    def input_read_by(self, output: Interval) -> Interval:
        return self.resize.output_reading(output)

    def output_reading(self, pixels: Interval) -> Interval:
        """The pixels of the input's gradient to which these pixels of the output's gradient add."""
        return self.resize.input_read_by(pixels)

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        centers = self.resize._centers
        return valid_cut([centers[bound - 1] + 1 if bound else 0 for bound in cut], self.resize.extent)

    def taps(self, index: int) -> Taps:
        """The output pixels whose gradients input pixel `index` sums, and their weights."""
        reading = self.resize.output_reading(Interval(index, index + 1))
        table = self.resize._table
        return reading.start, tuple(table[o][1][index - table[o][0]] for o in reading)


# ---------------------------------------------------------------------------------------------- the kinds


def _single(number: float) -> float:
    """`number`, rounded to float32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def _nearest(r: Resize, output: int) -> Taps:
    if r.count == r.extent:
        return output, (1.0,)
    if r.count == 2 * r.extent:
        return output // 2, (1.0,)
    return min(math.floor(_single(output * r.step)), r.extent - 1), (1.0,)


def _nearest_exact(r: Resize, output: int) -> Taps:
    return min(math.floor(_single((output + 0.5) * r.step)), r.extent - 1), (1.0,)


def _linear(r: Resize, output: int) -> Taps:
    if r.count == r.extent:
        return output, (1.0,)
    pixel, part = _split(r, max(0.0, r._source(output)))
    return (pixel, (1 - part, part)) if pixel + 1 < r.extent else (pixel, (1.0,))


def _split(r: Resize, source: float) -> tuple[int, float]:
    """A source's pixel and its fraction beyond that.  Torch's CPU kernels take the floor in float32 whatever the dtype."""
    pixel = min(math.floor(_single(source)), r.extent - 1)
    return pixel, min(max(source - pixel, 0.0), 1.0)


def _cubic(r: Resize, output: int) -> Taps:
    pixel, t = _split(r, r._source(output))
    weights = [_cubic_filter(x, -0.75) for x in (t + 1, t, 1 - t, 2 - t)]
    return _clamped(pixel - 1, weights, r.extent)


def _clamped(first: int, weights: list[float], extent: int) -> Taps:
    """Weights outside of the image, added to its border pixels."""
    start, stop = min(max(first, 0), extent - 1), min(max(first + len(weights), 1), extent)
    merged = [0.0] * (stop - start)
    for n, weight in enumerate(weights):
        merged[min(max(first + n, start), stop - 1) - start] += weight
    return start, tuple(merged)


def _antialiased(weight_at: Callable[[float], float], width: float) -> Callable[[Resize, int], Taps]:
    """Taps of a filter that reaches `width` pixels to either side, and proportionally farther where the image shrinks."""

    def taps(r: Resize, output: int) -> Taps:
        widen = max(1.0, r.step)
        middle, reach = r._rounded(r.step * (output + 0.5)), r._rounded(width * widen)
        start = max(int(r._rounded(r._rounded(middle - reach) + 0.5)), 0)
        stop = min(int(r._rounded(r._rounded(middle + reach) + 0.5)), r.extent)
        weights = [weight_at((pixel - middle + 0.5) / widen) for pixel in range(start, stop)]
        total = sum(weights) or 1.0
        return start, tuple(weight / total for weight in weights)

    return taps


def _linear_filter(x: float) -> float:
    return max(0.0, 1 - abs(x))


def _cubic_filter(x: float, a: float = -0.5) -> float:
    x = abs(x)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _lanczos_filter(x: float) -> float:
    def sinc(y: float) -> float:
        return math.sin(math.pi * y) / (math.pi * y) if y else 1.0

    return sinc(x) * sinc(x / 3) if -3 <= x < 3 else 0.0


_TAPS: dict[str, Callable[[Resize, int], Taps]] = {
    "nearest": _nearest,
    "nearest-exact": _nearest_exact,
    "linear": _linear,
    "cubic": _cubic,
    "linear-aa": _antialiased(_linear_filter, 1),
    "cubic-aa": _antialiased(_cubic_filter, 2),
    "lanczos-aa": _antialiased(_lanczos_filter, 3),
}
