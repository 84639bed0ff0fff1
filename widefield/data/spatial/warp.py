"""An image and its labels seen through a map: which source pixels a window of the output needs, and the window's pixels.

Where every output pixel is one source pixel, pixels are copied as they are.  Else the output is interpolated, in blocks, by
gathering: weights are fractions of float64 positions, used in float32 (float64 images: in float64), added in a fixed order.  So
a pixel has the same bits in every window.  `grid_sample` has not: its coordinates are shares of the tensor that it is given.

A position within half a pixel of the image's outermost pixel centers is inside, and shows that pixel; what lies further outside
shows `border`, and its label is the one that does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from widefield.data.spatial.border import Border, folded, label_outside, pixels_shown, rounded, selected, with_label
from widefield.data.spatial.coordinate_map import Array, CoordinateMap, Placement, Span, pixels_of
from widefield.geometry.box import Box, is_empty, size_of, within
from widefield.geometry.interval import Interval

Interpolation = Literal["nearest", "bilinear", "bicubic"]

BLOCK_PX = 128
"""Output pixels on a side that are gathered at a time, so that what they read stays in the processor's cache."""
_TAPS: dict[str, tuple[int, int]] = {"bilinear": (0, 1), "bicubic": (-1, 2)}
"""The first and the last pixel that is read, counted from the one before the position."""


@dataclass(frozen=True)
class Warp:
    """A map with what is shown between pixels and outside of the image.

    fill: one value, or one per channel, in units of the pixels.  samples: the mean of so many positions per output row and
    column is taken, against aliasing where an image shrinks.
    """

    map: CoordinateMap
    interpolation: Interpolation = "bilinear"
    border: Border = "constant"
    fill: tuple[float, ...] = (0.0,)
    samples: tuple[int, int] = (1, 1)

    def source_box(self, window: Box) -> Box:
        """The box of source pixels that a window of the output needs, at least one pixel."""
        if (placement := self._placement) is not None:
            asked = [_ends(placement, axis, window) for axis in (0, 1)]
        else:
            apart = [(count - 1) / (2 * count) for count in self.samples]
            rows, columns = ((run.start - by, run.stop - 1 + by) for run, by in zip(window, apart, strict=True))
            asked = [self._tapped(span) for span in self.map.reach(rows, columns)]
        return tuple(pixels_shown(*span, extent, self.border) for span, extent in zip(asked, self.map.source, strict=True))

    def view(
        self, part_CHW: Tensor, labels: Tensor | None, box: Box, window: Box, *, outside: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """The pixels (C, h, w) of a window of the output, of the image's dtype, and their labels, those of the nearest pixel.

        part_CHW, labels: the source pixels of `box`, which contains `source_box(window)`, and their labels, (h, w) or
        (K, h, w).  outside: the label of what is outside of the image; where the labels' dtype lacks it, they become int64.
        None: there is no such label; (K, h, w) has 0 there.
        Bicubic values beyond the range of an integer dtype end at its limits.
        ValueError: there is no label for what is outside of the image.
        """
        far = self._far(window)
        if labels is not None and outside is None:
            outside = label_outside(far, labels, 2)
        if labels is not None and outside is not None:
            labels = with_label(labels, outside)  # everywhere, since windows of one image want one dtype
        planes = None if labels is None else labels.reshape(-1, *labels.shape[-2:])
        view = self._gathered if self._placement is None else self._copied
        made, marks = view(part_CHW, planes, box, window)
        if far is not None:
            fill = rounded(torch.tensor(self.fill, dtype=torch.float64).view(-1, 1, 1), made.dtype)
            made = torch.where(far, fill, made) if self.border == "constant" else made
            marks = None if marks is None else torch.where(far, torch.tensor(outside, dtype=marks.dtype), marks)
        return made, None if labels is None or marks is None else marks.reshape(*labels.shape[:-2], *size_of(window))

    @property
    def _placement(self) -> Placement | None:
        return self.map.placement if self.samples == (1, 1) else None

    # ------------------------------------------------------------------------------------------ outside

    def _far(self, window: Box) -> Tensor | None:
        """Where a window shows what is outside of the image, (h, w) bool; None where it does so nowhere."""
        rows, columns = ((float(run.start), float(run.stop - 1)) for run in window)
        reach = self.map.reach(rows, columns)
        if all(-0.5 <= low and high < extent - 0.5 for (low, high), extent in zip(reach, self.map.source, strict=True)):
            return None
        far = np.zeros(size_of(window), dtype=bool)
        for block in _blocks(window):
            (y, x), (height, width) = self.map.positions(*map(pixels_of, block)), self.map.source
            far[within(window, block)] = (y < -0.5) | (y >= height - 0.5) | (x < -0.5) | (x >= width - 0.5)
        return torch.from_numpy(far) if far.any() else None

    def _tapped(self, span: Span) -> Span:
        """The pixels that are read for positions in a span; the nearest one, for labels, is among those of an interpolation."""
        if self.interpolation == "nearest":
            return float(np.floor(span[0] + 0.5)), float(np.floor(span[1] + 0.5))
        first, last = _TAPS[self.interpolation]
        return float(np.floor(span[0])) + first, float(np.floor(span[1])) + last

    # ------------------------------------------------------------------------------------------ copies

    def _copied(self, part_CHW: Tensor, labels: Tensor | None, box: Box, window: Box) -> tuple[Tensor, Tensor | None]:
        """Copies of whole pixels; outside, those that the border shows."""
        placement = self._placement
        assert placement is not None
        places = []
        for axis in (0, 1):
            run, extent = window[placement.of[axis]], self.map.source[axis]
            asked = placement.sign[axis] * np.arange(run.start, run.stop) + placement.start[axis]
            inside = not len(asked) or (asked.min() >= 0 and asked.max() < extent)
            shown = asked if inside else folded(asked.astype(np.float64), extent, self.border)
            places.append(shown.astype(np.int64) - box[axis].start)

        def copied(planes: Tensor) -> Tensor:
            found = selected(selected(planes, places[0], -2), places[1], -1)
            return (found.transpose(-1, -2) if placement.of == (1, 0) else found).contiguous()

        return copied(part_CHW), None if labels is None else copied(labels)

    # ------------------------------------------------------------------------------------------ gathering

    def _gathered(self, part_CHW: Tensor, labels: Tensor | None, box: Box, window: Box) -> tuple[Tensor, Tensor | None]:
        """Pixels of every position, as if all were inside or the border's, block by block."""
        made = torch.empty((len(part_CHW), *size_of(window)), dtype=part_CHW.dtype)
        marks = None if labels is None else torch.empty((len(labels), *size_of(window)), dtype=labels.dtype)
        work = torch.float64 if part_CHW.dtype == torch.float64 else torch.float32
        side = BLOCK_PX * (4 if self.map.is_separable else 1)
        for block in _blocks(window, side):
            inner, place = self.source_box(block), within(window, block)
            at = self._shown(self.map.positions(*map(pixels_of, block)))
            part = part_CHW[..., *within(box, inner)].to(work).contiguous()
            if self.interpolation == "nearest":
                values = self._nearest(part, at, inner)
            else:
                values = self._sampled(part, at, inner, block)
            made[..., *place] = rounded(values, made.dtype)
            if labels is not None and marks is not None:
                marks[..., *place] = self._nearest(labels[..., *within(box, inner)].contiguous(), at, inner)
        return made, marks

    def _shown(self, at: tuple[Array, Array]) -> tuple[Array, Array]:
        """The positions within the image that are shown at positions outside of it."""
        if self.border == "constant":
            return at
        return folded(at[0], self.map.source[0], self.border), folded(at[1], self.map.source[1], self.border)

    def _nearest(self, part: Tensor, at: tuple[Array, Array], inner: Box) -> Tensor:
        rows, columns = (_clipped(np.floor(one + 0.5), run) for one, run in zip(at, inner, strict=True))
        if self.map.is_separable:
            return part.index_select(-2, rows.flatten()).index_select(-1, columns.flatten())
        return _taken(part, rows * len(inner[1]) + columns)

    def _sampled(self, part: Tensor, at: tuple[Array, Array], inner: Box, block: Box) -> Tensor:
        """The mean of `samples` interpolated positions of each output pixel.  at: those of the centers."""
        if self.samples == (1, 1):
            return self._interpolated(part, at, inner)
        rows, columns = ([(number + 0.5) / count - 0.5 for number in range(count)] for count in self.samples)
        total: Tensor | None = None
        for down, across in ((down, across) for down in rows for across in columns):
            at = self._shown(self.map.positions(pixels_of(block[0]) + down, pixels_of(block[1]) + across))
            values = self._interpolated(part, at, inner)
            total = values if total is None else total.add_(values)
        assert total is not None
        return total.div_(self.samples[0] * self.samples[1])

    def _interpolated(self, part: Tensor, at: tuple[Array, Array], inner: Box) -> Tensor:
        (rows, down), (columns, across) = (
            taps(one, run, part.dtype, self.interpolation) for one, run in zip(at, inner, strict=True)
        )
        if self.map.is_separable:
            lines = blended([part.index_select(-2, row.flatten()) for row in rows], down)
            return blended([lines.index_select(-1, column.flatten()) for column in columns], across)
        starts = [row * len(inner[1]) for row in rows]
        return blended([blended([_taken(part, row + column) for column in columns], across) for row in starts], down)


def taps(at: Array, run: Interval, dtype: torch.dtype, interpolation: Interpolation) -> tuple[list[Tensor], list[Tensor]]:
    """Along one axis: the pixels around positions, counted from the run's start, and their weights; see `blended`."""
    before = np.floor(at)
    t = torch.from_numpy(at - before).to(dtype)
    first, last = _TAPS[interpolation]
    places = [_clipped(before + tap, run) for tap in range(first, last + 1)]
    return places, [t] if interpolation == "bilinear" else _cubic(t)


def blended(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Of two values a + (b - a) t, which keeps a constant as it is; of four the sum of weighted values, in their order."""
    if len(values) == 2:
        return (values[1] - values[0]).mul_(weights[0]).add_(values[0])
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def _cubic(t: Tensor) -> list[Tensor]:
    """Weights of Keys 1981 with a = -0.75, as torch's bicubic interpolation has them."""
    a = -0.75

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _clipped(at: Array, run: Interval) -> Tensor:
    """Whole positions, as pixels counted from the run's start; its ends for those outside."""
    return torch.from_numpy((np.clip(at, run.start, run.stop - 1) - run.start).astype(np.int64))


def _taken(part: Tensor, places: Tensor) -> Tensor:
    """(C, *places) pixels of planes, by their number."""
    return torch.stack([torch.take(plane, places) for plane in part])


def _ends(placement: Placement, axis: int, window: Box) -> Span:
    run = window[placement.of[axis]]
    ends = [placement.sign[axis] * pixel + placement.start[axis] for pixel in (run.start, run.stop - 1)]
    return float(min(ends)), float(max(ends))


def _blocks(window: Box, side: int = BLOCK_PX) -> list[Box]:
    if is_empty(window):
        return []
    rows, columns = (
        [Interval(start, min(start + side, run.stop)) for start in range(run.start, run.stop, side)] for run in window
    )
    return [(row, column) for row in rows for column in columns]
