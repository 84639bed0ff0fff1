"""Windows of slices, from a file that is read in larger regions, so that its blocks are not decoded for every window anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from widefield.geometry.box import Box, holds, is_empty, within
from widefield.geometry.interval import Interval
from widefield.image_files import ImageFile
from widefield.viewer.pyramid import TILE, Array

REGION_BYTES = 2**28
"""Of the pixels of a region, decoded, that are kept of each file."""


def extents_of(image: ImageFile) -> tuple[int, int, int]:
    """(depth, height, width), the depth of an image that is no volume being 1."""
    depth, height, width = (1, *image.info.size)[-3:]
    return depth, height, width


def axes_of(plane: int) -> tuple[int, int]:
    """The axes of (depth, height, width) that are the rows and the columns of a plane's slices.

    >>> axes_of(0), axes_of(1), axes_of(2)
    ((1, 2), (0, 2), (0, 1))
    """
    rows, columns = (axis for axis in range(3) if axis != plane)
    return rows, columns


@dataclass
class RegionReader:
    """Reads windows of an image's slices.

    A region is a square of tiles, a power of two of them on each side, as long as the file's blocks are: windows that come in
    the order of `walk` have left a region before they need another one.
    """

    image: ImageFile
    plane: int = 0
    needs_valid: bool = False
    _box: Box = ()
    _pixels: Array = field(default_factory=lambda: np.empty(0))
    _valid: Array | None = None

    def read(self, at: int, rows: Interval, columns: Interval) -> tuple[Array, Array | None]:
        """(C, height, width), and which of these pixels hold something: (height, width), or None where all do."""
        wanted = [Interval(at, at + 1)] * 3
        for axis, run in zip(axes_of(self.plane), (rows, columns), strict=True):
            wanted[axis] = run
        box = tuple(wanted)
        if not self._box or not holds(self._box, box):
            self._load(box)
        inner = within(self._box, box)
        valid = None if self._valid is None else self._valid[inner].take(0, self.plane)
        return self._pixels[(slice(None), *inner)].take(0, 1 + self.plane), valid

    def _load(self, box: Box) -> None:
        extents = extents_of(self.image)
        starts = [run.start // step * step for run, step in zip(box, self._steps(), strict=True)]
        self._box = tuple(
            Interval(start, min(extent, start + step))
            for start, step, extent in zip(starts, self._steps(), extents, strict=True)
        )
        if is_empty(self._box):
            raise AssertionError(f"an empty region {self._box} of {self.image}")
        window = self._box[-len(self.image.info.size) :]
        shape = tuple(map(len, self._box))
        self._pixels = self.image.read(window).reshape(-1, *shape)
        valid = self.image.valid(window) if self.needs_valid else None
        self._valid = None if valid is None else valid.reshape(shape)

    def _steps(self) -> tuple[int, ...]:
        """The size of regions."""
        info = self.image.info
        extents, blocks = extents_of(self.image), (1, *info.levels[0].block)[-3:]
        pixel_bytes = info.channels * np.dtype(info.dtype).itemsize
        axes = axes_of(self.plane)
        longest, side = max(min(blocks[axis], extents[axis]) for axis in axes), TILE
        while side < longest and (2 * side) ** 2 * pixel_bytes <= REGION_BYTES:
            side *= 2
        steps = [0, 0, 0]
        for axis in axes:
            steps[axis] = side
        slice_bytes = pixel_bytes * int(np.prod([min(side, extents[axis]) for axis in axes]))
        steps[self.plane] = max(1, min(blocks[self.plane], REGION_BYTES // slice_bytes))
        return tuple(steps)


def spread(extent: int, length: int, most: int) -> list[Interval]:
    """At most so many intervals of `length` pixels, evenly over an extent; all of it where that is not longer.

    >>> spread(10, 4, 2), spread(3, 4, 2)
    ([Interval(start=0, stop=4), Interval(start=6, stop=10)], [Interval(start=0, stop=3)])
    """
    if extent <= length:
        return [Interval(0, extent)]
    count = min(most, -(-extent // length))
    starts: Any = np.linspace(0, extent - length, count).round().astype(int)
    return [Interval(int(start), int(start) + length) for start in starts]
