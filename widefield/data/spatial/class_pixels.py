"""Drawing a pixel of a class from the labels of an image of any size: each is as likely, those at the border too.

Labels are read once, in bands of rows; what is left of them are counts per block of pixels.  A draw then reads one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval

BLOCK_PX = 256
Array = np.ndarray[Any, Any]
ReadLabels = Callable[[Box], Tensor]
"""The labels of a box: (h, w) class numbers, or (K, h, w) of 0 and 1."""


@dataclass(frozen=True)
class ClassPixels:
    """Per class that an image has: the numbers of the blocks that have it, row by row, and how many of its pixels each has."""

    size: tuple[int, int]
    blocks: dict[int, tuple[Array, Array]]
    layers: bool
    """Whether a pixel may have several classes, so that class 0 is one like the others."""

    def draw(self, classes: Sequence[int] | None, labels: ReadLabels, generator: np.random.Generator) -> tuple[int, int] | None:
        """(row, column) of a pixel; its class is drawn first, from those of `classes` that the image has.

        classes: None for all, without class 0 where a pixel has one class.  None where the image has none of them.
        """
        asked = [number for number in self.blocks if number or self.layers] if classes is None else classes
        there = sorted(number for number in self.blocks if number in asked)
        if not there:
            return None
        chosen = there[int(generator.integers(len(there)))]
        numbers, counts = self.blocks[chosen]
        rank = int(generator.integers(int(counts.sum())))
        place = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        box = _block(self.size, int(numbers[place]))
        rank -= int(counts[:place].sum())
        row, column = divmod(int(np.flatnonzero(_is_class(labels(box), chosen))[rank]), len(box[1]))
        return box[0].start + row, box[1].start + column


def class_pixels_of(size: tuple[int, int], labels: ReadLabels, *, num_classes: int) -> ClassPixels:
    """The counts of an image of `size` (H, W).  Cost: all labels are read once, BLOCK_PX rows at a time."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    layers, across = False, -(-size[1] // BLOCK_PX)
    for band in range(-(-size[0] // BLOCK_PX)):
        rows = Interval(band * BLOCK_PX, min((band + 1) * BLOCK_PX, size[0]))
        marks = labels((rows, Interval(0, size[1])))
        layers = marks.ndim == 3
        for column in range(across):
            part = marks[..., column * BLOCK_PX : (column + 1) * BLOCK_PX]
            for number, count in _counted(part, num_classes):
                numbers, counts = found.setdefault(number, ([], []))
                numbers.append(band * across + column)
                counts.append(count)
    blocks = {number: (np.array(numbers), np.array(counts)) for number, (numbers, counts) in found.items()}
    return ClassPixels(size, blocks, layers)


def _counted(part: Tensor, num_classes: int) -> list[tuple[int, int]]:
    """The classes of a block, with their pixels; labels that are no class are left out."""
    if part.ndim == 3:
        counts = (part == 1).flatten(1).sum(1).numpy()
    else:
        marks = part.numpy().ravel()
        counts = np.bincount(marks[(marks >= 0) & (marks < num_classes)].astype(np.int64), minlength=num_classes)
    return [(int(number), int(counts[number])) for number in np.flatnonzero(counts)]


def _is_class(part: Tensor, number: int) -> Array:
    return (part[number] == 1).numpy() if part.ndim == 3 else (part == number).numpy()


def _block(size: tuple[int, int], number: int) -> Box:
    row, column = divmod(number, -(-size[1] // BLOCK_PX))
    starts = row * BLOCK_PX, column * BLOCK_PX
    rows, columns = (Interval(start, min(start + BLOCK_PX, extent)) for start, extent in zip(starts, size, strict=True))
    return rows, columns
