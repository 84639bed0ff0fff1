"""Levels of an image that is read once, tile after tile, so that only some tiles are in memory at a time.

A node is what is known of a tile: arrays (..., height, width) by name.  Sums add up, and labels are the most frequent of four.
A pixel at the last row or column of a level covers what there is of the file, so sums are of no pixel outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from widefield.geometry.interval import Interval
from widefield.image_files.label_image import halved

Array = np.ndarray[Any, Any]
Node = Mapping[str, Array]
TILE = 512
"""Pixels of a tile's side."""


@dataclass(frozen=True)
class Place:
    """Of a tile: its level, and its row and column among the tiles of that level."""

    level: int
    row: int
    column: int


@dataclass(frozen=True)
class TileGrid:
    """The tiles of one slice.  height, width: its pixels in the file."""

    height: int
    width: int

    @property
    def levels(self) -> int:
        """How many there are, until one tile has all of it.

        >>> TileGrid(512, 300).levels, TileGrid(513, 300).levels, TileGrid(16384, 16384).levels
        (1, 2, 6)
        """
        return 1 + max(0, math.ceil(math.log2(max(self.height, self.width) / TILE)))

    def size_at(self, level: int) -> tuple[int, int]:
        """The pixels of a level.

        >>> TileGrid(1025, 7).size_at(1), TileGrid(1025, 7).size_at(2)
        ((513, 4), (257, 2))
        """
        return -(-self.height // 2**level), -(-self.width // 2**level)

    def tiles_at(self, level: int) -> tuple[int, int]:
        """The rows and columns of tiles."""
        height, width = self.size_at(level)
        return -(-height // TILE), -(-width // TILE)

    def tiles(self, start: int = 0) -> int:
        """How many tiles there are from a level on, or of the last level.

        >>> [TileGrid(16384, 16384).tiles(start) for start in (0, 1, 9)]
        [1365, 341, 1]
        """
        return sum(math.prod(self.tiles_at(level)) for level in range(min(start, self.levels - 1), self.levels))

    def pixels(self, start: int = 0) -> int:
        """How many pixels these have.

        >>> TileGrid(1024, 513).pixels(), TileGrid(1024, 513).pixels(1)
        (656896, 131584)
        """
        return sum(math.prod(self.size_at(level)) for level in range(min(start, self.levels - 1), self.levels))

    def window(self, place: Place) -> tuple[Interval, Interval]:
        """The rows and columns of a tile, in pixels of its level."""
        height, width = self.size_at(place.level)
        top, left = TILE * place.row, TILE * place.column
        return Interval(top, min(height, top + TILE)), Interval(left, min(width, left + TILE))

    def area(self, place: Place) -> Array:
        """(height, width) of a tile: how many pixels of the file each of its pixels covers."""
        rows, columns = self.window(place)
        return np.outer(_covered(rows, place.level, self.height), _covered(columns, place.level, self.width))


def _covered(run: Interval, level: int, extent: int) -> Array:
    starts = np.arange(run.start, run.stop) * 2**level
    return np.minimum(starts + 2**level, extent) - starts


def walk(grid: TileGrid, read: Callable[[Place], Node], labels: frozenset[str]) -> Iterator[tuple[Place, Node]]:
    """Every tile of every level with its node, each after the four that it covers.

    read: the node of a tile of level 0, which is called once for each, neighbours after one another.
    labels: the names of arrays that are labels; the others are sums.
    """

    def visit(place: Place) -> Generator[tuple[Place, Node], None, Node]:
        if place.level == 0:
            node = read(place)
        else:
            rows, columns = grid.tiles_at(place.level - 1)
            parts: list[list[Node]] = []
            for row in range(2 * place.row, min(rows, 2 * place.row + 2)):
                parts.append([])
                for column in range(2 * place.column, min(columns, 2 * place.column + 2)):
                    finer = yield from visit(Place(place.level - 1, row, column))
                    parts[-1].append(_smaller(finer, labels))
            node = {name: np.block([[part[name] for part in row] for row in parts]) for name in parts[0][0]}
        yield place, node
        return node

    yield from visit(Place(grid.levels - 1, 0, 0))


def _smaller(node: Node, labels: frozenset[str]) -> Node:
    return {name: halved(array) if name in labels else added(array) for name, array in node.items()}


def added(sums: Array) -> Array:
    """Sums (..., H, W) at half the resolution; an odd last row or column stays as it is.

    >>> added(np.array([[1, 1, 5], [1, 0, 0], [2, 2, 7]])).tolist()
    [[3, 5], [4, 7]]
    """
    height, width = sums.shape[-2:]
    sums = np.pad(sums, [(0, 0)] * (sums.ndim - 2) + [(0, height % 2), (0, width % 2)])
    return sums[..., ::2, ::2] + sums[..., 1::2, ::2] + sums[..., ::2, 1::2] + sums[..., 1::2, 1::2]
