"""An image of class numbers that is to be written beside the image it belongs to: the same pixels in the same place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval
from widefield.image_files.image_file import Array
from widefield.image_files.info import ImageInfo

ReadLabels = Callable[[Box], Array]
"""From a box of the spatial dims, the class numbers in it."""


class OnImage:
    """What lies on the pixels of an image, in blocks and in smaller levels.  like: what the file of the image says."""

    like: ImageInfo

    @property
    def size(self) -> tuple[int, ...]:
        return self.like.size

    def size_at(self, step: int) -> tuple[int, ...]:
        """At a level whose pixels cover 2 ** step pixels on the last two axes."""
        *first, height, width = self.size
        return (*first, -(-height // 2**step), -(-width // 2**step))

    def levels(self, block: int) -> int:
        """How many there are, until one fits into a block."""
        side = max(self.size[-2:])
        return 1 + max(0, math.ceil(math.log2(side / block)))

    def blocks(self, extent: int, step: int = 0) -> Iterator[Box]:
        """Boxes of `extent` pixels on each of the last two axes of a level, in the order of files, one slice at a time."""
        *first, height, width = self.size_at(step)
        for at in np.ndindex(*first):
            for top in range(0, height, extent):
                for left in range(0, width, extent):
                    rows = Interval(top, min(height, top + extent)), Interval(left, min(width, left + extent))
                    yield (*(Interval(index, index + 1) for index in at), *rows)


@dataclass(frozen=True)
class LabelImage(OnImage):
    """source, like: the image, and what its file says.  dtype: uint8, or uint16 for more than 255 classes.

    classes: the names, in order.  colours: (red, green, blue) of each.
    nodata: the number of pixels without an answer; None: all have one.
    notes: what else is to be known of it, as how it was made.
    """

    source: Path
    like: ImageInfo
    dtype: str
    classes: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    nodata: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> list[tuple[int, int, int]]:
        """The colours by number, those of classes and grey for nodata, up to the last that is known."""
        found = list(self.colours)
        if self.nodata is not None and self.nodata < 256:
            found += [(0, 0, 0)] * (self.nodata + 1 - len(found))
            found[self.nodata] = (128, 128, 128)
        return found


def read_smaller(
    read: ReadLabels, labels: OnImage, box: Box, step: int, halve: Callable[[Array], Array] | None = None
) -> Array:
    """The numbers of a box of a smaller level, from the image, of which some boxes of that size are in memory at once.

    halve: what makes half the resolution; None: `halved`.
    """
    if step == 0:
        return read(box)
    *first, rows, columns = box
    finer = [
        Interval(2 * one.start, min(extent, 2 * one.stop))
        for one, extent in zip((rows, columns), labels.size_at(step - 1)[-2:], strict=True)
    ]
    read_finer = partial(read_smaller, read, labels, step=step - 1, halve=halve)
    return (halve or halved)(
        np.block([[read_finer((*first, top, left)) for left in _halves(finer[1])] for top in _halves(finer[0])])
    )


def _halves(interval: Interval) -> list[Interval]:
    middle = (interval.start + interval.stop + 1) // 2
    return [one for one in (Interval(interval.start, middle), Interval(middle, interval.stop)) if len(one)]


def halved(labels: Array) -> Array:
    """Labels (..., H, W) at half the resolution: of 2 x 2 pixels the most frequent number, of equal ones the greatest.

    So that a thin thing stays where the background has a smaller number.  An odd last row or column counts alone.

    >>> halved(np.array([[1, 1, 0], [1, 0, 0], [0, 2, 5]], np.uint8)).tolist()
    [[1, 0], [2, 5]]
    """
    height, width = labels.shape[-2:]
    labels = np.pad(labels, [(0, 0)] * (labels.ndim - 2) + [(0, height % 2), (0, width % 2)], mode="edge")
    four = np.stack([labels[..., row::2, column::2] for row in (0, 1) for column in (0, 1)])
    four.sort(axis=0)
    low, second, third, high = four
    # sorted, a number that occurs at least twice has a neighbour of the same value: the later pair wins
    return np.where(third == high, high, np.where(second == third, third, np.where(low == second, second, high)))
