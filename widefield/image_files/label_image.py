"""An image of class numbers that is to be written beside the image it belongs to: the same pixels in the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval
from widefield.image_files.image_file import Array
from widefield.image_files.info import ImageInfo

ReadLabels = Callable[[Box], Array]
"""From a box of the spatial dims, the class numbers in it."""


@dataclass(frozen=True)
class LabelImage:
    """like: of the image.  dtype: uint8, or uint16 for more than 256 classes.  classes: the names, in order.

    colours: (red, green, blue) of each.  nodata: the number of pixels without an answer; None: all have one.
    notes: what else is to be known of it, as how it was made.
    """

    like: ImageInfo
    dtype: str
    classes: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    nodata: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, ...]:
        return self.like.size

    def blocks(self, extent: int) -> Iterator[Box]:
        """Boxes of `extent` pixels on each of the last two axes, in the order of files in blocks, one slice at a time."""
        *first, height, width = self.size
        for at in np.ndindex(*first):
            for top in range(0, height, extent):
                for left in range(0, width, extent):
                    rows = Interval(top, min(height, top + extent)), Interval(left, min(width, left + extent))
                    yield (*(Interval(index, index + 1) for index in at), *rows)


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
