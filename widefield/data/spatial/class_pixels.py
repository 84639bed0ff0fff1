"""Drawing a pixel of a class from the labels of an image of any size: each is as likely, those at the border too.

Labels are read once, in bands of blocks; what is left of them are counts per block of pixels.  A draw then reads one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from widefield.geometry.box import Box, size_of, within
from widefield.geometry.interval import Interval

_BLOCK_PX = {2: 256, 3: 64}
"""The side of a block, by the number of dims of an image's pixels."""
Array = np.ndarray[Any, Any]
ReadLabels = Callable[[Box], Tensor]
"""The labels of a box: (*pixels) class numbers, or (K, *pixels) of 0 and 1."""


@dataclass(frozen=True)
class ClassPixels:
    """Per class that an image has: the numbers of the blocks that have it, row by row, and how many of its pixels each has."""

    size: tuple[int, ...]
    blocks: dict[int, tuple[Array, Array]]
    layers: bool
    """Whether a pixel may have several classes, so that class 0 is one like the others."""

    def draw(self, classes: Sequence[int] | None, labels: ReadLabels, generator: np.random.Generator) -> tuple[int, ...] | None:
        """The place of a pixel, as (row, column); its class is drawn first, from those of `classes` that the image has.

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
        found = np.flatnonzero(_is_class(labels(box), chosen, layers=self.layers))[rank]
        return tuple(run.start + int(at) for run, at in zip(box, np.unravel_index(found, size_of(box)), strict=True))


def class_pixels_of(size: tuple[int, ...], labels: ReadLabels, *, num_classes: int) -> ClassPixels:
    """The counts of an image of `size`.  Cost: all labels are read once, a band of blocks at a time."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    grid, layers = _grid(size), False
    in_band = int(np.prod(grid[1:]))
    for first in range(0, grid[0] * in_band, in_band):
        band = (_block(size, first)[0], *(Interval(0, extent) for extent in size[1:]))
        marks = labels(band)
        layers = marks.ndim > len(size)
        for block in range(first, first + in_band):
            part = marks[(..., *within(band, _block(size, block)))]
            for number, count in _counted(part, num_classes, layers=layers):
                numbers, counts = found.setdefault(number, ([], []))
                numbers.append(block)
                counts.append(count)
    blocks = {number: (np.array(numbers), np.array(counts)) for number, (numbers, counts) in found.items()}
    return ClassPixels(size, blocks, layers)


def _counted(part: Tensor, num_classes: int, *, layers: bool) -> list[tuple[int, int]]:
    """The classes of a block, with their pixels; labels that are no class are left out."""
    if layers:
        counts = (part == 1).flatten(1).sum(1).numpy()
    else:
        marks = part.numpy().ravel()
        counts = np.bincount(marks[(marks >= 0) & (marks < num_classes)].astype(np.int64), minlength=num_classes)
    return [(int(number), int(counts[number])) for number in np.flatnonzero(counts)]


def _is_class(part: Tensor, number: int, *, layers: bool) -> Array:
    return (part[number] == 1).numpy() if layers else (part == number).numpy()


def _grid(size: Sequence[int]) -> tuple[int, ...]:
    """How many blocks there are along each dim."""
    return tuple(-(-extent // _BLOCK_PX[len(size)]) for extent in size)


def _block(size: Sequence[int], number: int) -> Box:
    side = _BLOCK_PX[len(size)]
    starts = [int(at) * side for at in np.unravel_index(number, _grid(size))]
    return tuple(Interval(start, min(start + side, extent)) for start, extent in zip(starts, size, strict=True))
