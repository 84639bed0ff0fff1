"""Which input pixels does an output pixel read?  Integer arithmetic, one dim at a time.

Coordinates are pixels of the whole: pixel i of a dim of extent n has 0 <= i < n; padding lies below 0 and from n on.
No tensor, no process.  Every class here implements `Reach`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from widefield.geometry.interval import Interval, even_cut


class Reach(Protocol):
    """How the output pixels of one dim read the input pixels of that dim.

    Most have `output_reading`, too: the output pixels that read an input interval.
    """

    def input_read_by(self, output: Interval) -> Interval:
        """The smallest interval that contains all input pixels that `output` reads.  It may reach into the padding."""

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        """The output's cut that follows from the input's: output pixels stay with the pixels they read, as far as they can."""


EMPTY = Interval(0, 0)


@dataclass(frozen=True)
class Window:
    """Output pixel o reads input pixels o * stride - padding + dilation * j for j = 0 .. size - 1.

    extent: the number of input pixels; count: of output pixels.

    >>> stem = Window(size=7, stride=2, padding=3, extent=64, count=32)
    >>> stem.input_read_by(Interval(16, 32)), stem.output_reading(Interval(0, 32)), stem.cut_of((0, 35, 64))
    (Interval(start=29, stop=66), Interval(start=0, stop=18), (0, 18, 32))
    """

    size: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extent: int = 0
    count: int = 0

    @property
    def span(self) -> int:
        """The number of pixels from a window's first to its last, inclusive."""
        return self.dilation * (self.size - 1) + 1

    def input_read_by(self, output: Interval) -> Interval:
        if len(output) == 0:
            return EMPTY
        start = output.start * self.stride - self.padding
        return Interval(start, start + (len(output) - 1) * self.stride + self.span)

    def output_reading(self, pixels: Interval) -> Interval:
        """The output pixels whose spans meet the input interval; none outside of the whole."""
        if len(pixels) == 0:
            return EMPTY
        start = -(-(pixels.start + self.padding - self.span + 1) // self.stride)
        stop = (pixels.stop - 1 + self.padding) // self.stride + 1
        return Interval(max(0, start), min(self.count, stop))

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        middle = self.padding - (self.span - 1) // 2
        return valid_cut([-(-(b + middle) // self.stride) for b in cut], self.count)


@dataclass(frozen=True)
class Spread:
    """The adjoint of a window, as in a transposed convolution: input pixel i writes the pixels that window i reads.

    window: its `extent` counts the pixels written, its `count` the pixels read.

    >>> double = Spread(Window(size=4, stride=2, padding=1, extent=128, count=64))
    >>> double.input_read_by(Interval(64, 128)), double.cut_of((0, 32, 64))
    (Interval(start=31, stop=64), (0, 64, 128))
    """

    window: Window

    def input_read_by(self, output: Interval) -> Interval:
        return self.window.output_reading(output)

    def output_reading(self, pixels: Interval) -> Interval:
        """The output pixels that these input pixels write; none outside of the whole."""
        return self.window.input_read_by(pixels) & Interval(0, self.window.extent)

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        w = self.window
        return valid_cut([b * w.stride - w.padding + (w.span - w.stride + 1) // 2 for b in cut], w.extent)


@dataclass(frozen=True)
class Bins:
    """Adaptive pooling: output o of `count` reads floor(o * extent / count) up to but not ceil((o + 1) * extent / count).

    >>> Bins(extent=7, count=3).input_read_by(Interval(1, 2))
    Interval(start=2, stop=5)
    """

    extent: int
    count: int

    def input_read_by(self, output: Interval) -> Interval:
        if len(output) == 0:
            return EMPTY
        return Interval(output.start * self.extent // self.count, -(-output.stop * self.extent // self.count))

    def output_reading(self, pixels: Interval) -> Interval:
        """The output pixels whose bins meet the input interval."""
        if len(pixels) == 0:
            return EMPTY
        start = pixels.start * self.count // self.extent
        return Interval(start, min(self.count, -(-pixels.stop * self.count // self.extent)))

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([-(-b * self.count // max(1, self.extent)) for b in cut], self.count)


@dataclass(frozen=True)
class Shift:
    """Output pixel o reads input pixel o + offset, as in crops and constant padding.  There are `count` output pixels.

    >>> Shift(offset=-2, count=9).cut_of((0, 3, 5))
    (0, 5, 9)
    """

    offset: int
    count: int

    def input_read_by(self, output: Interval) -> Interval:
        return Interval(output.start + self.offset, output.stop + self.offset) if len(output) else EMPTY

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([b - self.offset for b in cut], self.count)


@dataclass(frozen=True)
class StridedRun:
    """The output pixels in `output` read input pixels first, first + step, first + 2 * step, ...; step is 1, 0 or -1.

    >>> mirrored = StridedRun(output=Interval(0, 3), first=3, step=-1)
    >>> mirrored.input_read_by(Interval(1, 9)), mirrored.output_reading(Interval(3, 9))
    (Interval(start=1, stop=3), Interval(start=0, stop=1))
    """

    output: Interval
    first: int
    step: int

    def input_read_by(self, output: Interval) -> Interval:
        part = output & self.output
        if len(part) == 0:
            return EMPTY
        ends = [self.first + self.step * (o - self.output.start) for o in (part.start, part.stop - 1)]
        return Interval(min(ends), max(ends) + 1)

    def output_reading(self, pixels: Interval) -> Interval:
        """The output pixels of this run that read any of these pixels."""
        if self.step == 0:
            return self.output if self.first in pixels else EMPTY
        start, ends = self.output.start, (pixels.start - self.first, pixels.stop - 1 - self.first)
        low, high = ends if self.step > 0 else (-ends[1], -ends[0])
        return Interval(start + low, start + high + 1) & self.output

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([b - self.first + self.output.start for b in cut], self.output.stop)


@dataclass(frozen=True)
class Border:
    """Padding with the image's own pixels: up to three runs (before, body, after) that together are the output.

    >>> mirror = border("reflect", extent=6, before=2, after=1)
    >>> mirror.input_read_by(Interval(0, 3)), mirror.output_reading(Interval(1, 2)), mirror.cut_of((0, 3, 6))
    (Interval(start=0, stop=3), Interval(start=1, stop=4), (0, 5, 9))
    """

    before: int
    count: int
    runs: tuple[StridedRun, ...]

    def input_read_by(self, output: Interval) -> Interval:
        return hull([run.input_read_by(output) for run in self.runs])

    def output_reading(self, pixels: Interval) -> Interval:
        """The interval from the first to the last output pixel that reads any of these pixels."""
        return hull([run.output_reading(pixels) for run in self.runs])

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([b + self.before for b in cut], self.count)


def border(kind: str, *, extent: int, before: int, after: int) -> Border:
    """Padding of `kind` "reflect", "replicate" or "circular".  Negative sides crop; circular padding then wraps what is left.

    >>> [tuple(run.input_read_by(run.output)) for run in border("circular", extent=4, before=1, after=-1).runs]
    [(2,), (0, 1, 2)]
    """
    skipped, count = max(0, -before), extent + before + after
    left = extent + min(0, before) + min(0, after)
    start = max(0, before)
    first = {"reflect": before, "replicate": 0, "circular": skipped + left - start}[kind]
    last = {"reflect": extent - 2, "replicate": extent - 1, "circular": skipped}[kind]
    step = {"reflect": -1, "replicate": 0, "circular": 1}[kind]
    runs = (
        StridedRun(Interval(0, start), first, step),
        StridedRun(Interval(start, start + left), skipped, 1),
        StridedRun(Interval(start + left, count), last, step),
    )
    return Border(before, count, tuple(run for run in runs if len(run.output)))


def hull(intervals: list[Interval]) -> Interval:
    """The smallest interval that contains all of these; empty ones do not count.

    >>> hull([Interval(4, 6), EMPTY, Interval(1, 2)])
    Interval(start=1, stop=6)
    """
    full = [interval for interval in intervals if len(interval)]
    return Interval(min(i.start for i in full), max(i.stop for i in full)) if full else EMPTY


@dataclass(frozen=True)
class Every:
    """Every output pixel may read every one of `extent` input pixels.

    >>> Every(extent=9, count=4).input_read_by(Interval(1, 2)), Every(extent=9, count=4).cut_of((0, 5, 9))
    (Interval(start=0, stop=9), (0, 2, 4))
    """

    extent: int
    count: int

    def input_read_by(self, output: Interval) -> Interval:
        return Interval(0, self.extent) if len(output) else EMPTY

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([b * self.count // max(1, self.extent) for b in cut], self.count)


@dataclass(frozen=True)
class Adjoint:
    """The adjoint of another reach: it reads that reach's outputs and writes its inputs, of which there are `extent`.

    >>> Adjoint(Bins(extent=7, count=3), 7).input_read_by(Interval(2, 3))
    Interval(start=0, stop=2)
    """

    reach: Bins | Border | StridedRun
    extent: int

    def input_read_by(self, output: Interval) -> Interval:
        return self.reach.output_reading(output)

    def output_reading(self, pixels: Interval) -> Interval:
        """The inputs of `reach` that these of its outputs read."""
        return self.reach.input_read_by(pixels)

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return valid_cut([b * self.extent // max(1, cut[-1]) for b in cut], self.extent)


def valid_cut(bounds: list[int], count: int) -> tuple[int, ...]:
    """The cut of `count` pixels at these boundaries, clipped to them; an even cut where a tile would be empty without need.

    >>> valid_cut([-1, 3, 7], 6), valid_cut([0, 9, 9], 6)
    ((0, 3, 6), (0, 3, 6))
    """
    cut = (0, *(min(max(b, 0), count) for b in bounds[1:-1]), count)
    parts = len(cut) - 1
    if count >= parts and any(a == b for a, b in zip(cut, cut[1:], strict=False)):
        return even_cut(count, parts)
    return cut


def per_dim(values: int | Sequence[int], dims: int) -> list[int]:
    """One number per dim, from torch's arguments that may also give one number for all dims.

    >>> per_dim(3, 2), per_dim([3], 2), per_dim((3, 1), 2)
    ([3, 3], [3, 3], [3, 1])
    """
    numbers = list(values) if isinstance(values, Sequence) else [values]
    return numbers if len(numbers) == dims else numbers * dims


def window_count(extent: int, *, size: int, stride: int, padding: int, dilation: int = 1, ceil_mode: bool = False) -> int:
    """The number of windows, as torch counts them.  With ceil_mode the last may reach past the right padding, not start in it.

    >>> window_count(7, size=3, stride=2, padding=1), window_count(6, size=2, stride=4, padding=0, ceil_mode=True)
    (4, 2)
    """
    room = extent + 2 * padding - dilation * (size - 1) - 1 + (stride - 1 if ceil_mode else 0)
    count = room // stride + 1
    if ceil_mode and (count - 1) * stride >= extent + padding:
        count -= 1
    return max(0, count)
