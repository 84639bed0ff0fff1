"""Which rank has which pixels?  Grid: the ranks that share one image.  Layout: a whole's shape and its cuts over the grid.

Integers only.  Layouts are interned: equal layouts are one object, so `is` compares them and caches may use them as keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple
from weakref import WeakValueDictionary

from widefield.geometry.box import Box, size_of
from widefield.geometry.interval import Interval


@dataclass(frozen=True)
class Grid:
    """The ranks that share one image: `sizes` gives the ranks per space axis; ranks are numbered in row-major order.

    index: this rank's number in the grid.
    groups: (axes, name of the process group) for every set of axes that are larger than 1; axes ascend.
    """

    sizes: tuple[int, ...]
    index: int = 0
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()

    @cached_property
    def size(self) -> int:
        return math.prod(self.sizes)

    def coordinate(self, index: int) -> tuple[int, ...]:
        """A rank's position on each axis."""
        place = []
        for size in reversed(self.sizes):
            index, at = divmod(index, size)
            place.append(at)
        return tuple(reversed(place))

    def num_shards(self, axes: tuple[int, ...]) -> int:
        """The number of ranks along these axes: how many tiles a cut along them makes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place_on(self, axes: tuple[int, ...], index: int) -> int:
        """The number of rank `index`'s tile among those of a cut along `axes`, which count in the given order."""
        coordinate, place = self.coordinate(index), 0
        for axis in axes:
            place = place * self.sizes[axis] + coordinate[axis]
        return place

    def group_name(self, axes: tuple[int, ...]) -> str:
        """The name of the process group of the ranks that differ from this one in `axes` alone."""
        used = tuple(sorted(axis for axis in axes if self.sizes[axis] > 1))
        return dict(self.groups)[used]

    def group_axes(self) -> tuple[tuple[int, ...], ...]:
        """Every set of axes that needs a process group."""
        large = [axis for axis, size in enumerate(self.sizes) if size > 1]
        picks = product((False, True), repeat=len(large))
        return tuple(sorted(chosen for pick in picks if (chosen := tuple(a for a, p in zip(large, pick, strict=True) if p))))


class Cut(NamedTuple):
    """One dim cut at `bounds`, as (0, 35, 64), over the ranks along `axes` of the grid; several axes count row-major."""

    axes: tuple[int, ...]
    bounds: tuple[int, ...]


Cuts = tuple[Cut | None, ...]


class Layout:
    """A whole's shape and, for each of its dims, the Cut or None.  `box` is this rank's part.  Make layouts by `layout_of`."""

    __slots__ = (
        "shape", "cuts", "grid", "box", "tile_shape", "is_cut", "axes", "num_shards", "is_empty", "strides",
        "single_rank_layouts", "_boxes", "_sources", "_is_thin", "_ordered_dims", "__weakref__",
    )  # fmt: skip

    def __init__(self, shape: tuple[int, ...], cuts: Cuts, grid: Grid) -> None:
        self.shape, self.cuts, self.grid = shape, cuts, grid
        used = [cut for cut in cuts if cut is not None]
        self.axes = tuple(sorted(axis for cut in used for axis in cut.axes))
        self.is_cut = bool(used)
        self.num_shards = grid.num_shards(self.axes)
        self.box: Box = self.box_of(grid.index)
        self.tile_shape = size_of(self.box)
        self.is_empty = 0 in self.tile_shape
        self._boxes: tuple[Box, ...] | None = None
        self._sources: tuple[tuple[int, ...], ...] | None = None
        self._is_thin: bool | None = None
        self._ordered_dims: list[int] | None = None
        self.strides: dict = {}
        self.single_rank_layouts: dict | None = _SINGLE_RANK_LAYOUTS.setdefault(grid, {}) if grid.size == 1 else None
        """On a grid of one rank, its layouts by shape, shared by all of them; else None.  See tiled/single_rank.py."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Each rank's box; computed on first use, for a grid of tiles in time may have thousands of places."""
        if self._boxes is None:
            self._boxes = tuple(self.box_of(rank) for rank in range(self.grid.size))
        return self._boxes

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks with its position on the axes that cut nothing: one rank per distinct tile."""
        if self._sources is None:
            grid = self.grid
            others = tuple(axis for axis in range(len(grid.sizes)) if axis not in self.axes)
            replica = [grid.place_on(others, rank) for rank in range(grid.size)]
            self._sources = tuple(tuple(q for q in range(grid.size) if replica[q] == replica[r]) for r in range(grid.size))
        return self._sources

    @property
    def is_thin(self) -> bool:
        """Whether some rank has fewer than two pixels of a dim that has more: its tile's strides then do not say where that
        dim lies in memory."""
        if self._is_thin is None:
            pairs = [pair for box in self.boxes for pair in zip(box, self.shape, strict=True)]
            self._is_thin = any(len(interval) < min(2, extent) for interval, extent in pairs)
        return self._is_thin

    @property
    def ordered_dims(self) -> list[int]:
        """The dims of which every rank has two pixels or more, whose order the tiles' strides give; none if a tile is empty."""
        if self._ordered_dims is None:
            least = [min(len(box[dim]) for box in self.boxes) for dim in range(len(self.shape))]
            self._ordered_dims = [dim for dim, pixels in enumerate(least) if pixels > 1] if all(least) else []
        return self._ordered_dims

    def box_of(self, rank: int) -> Box:
        """A rank's part of the whole, as a box."""
        box = []
        for extent, cut in zip(self.shape, self.cuts, strict=True):
            if cut is None:
                box.append(Interval(0, extent))
            else:
                place = self.grid.place_on(cut.axes, rank)
                box.append(Interval(cut.bounds[place], cut.bounds[place + 1]))
        return tuple(box)

    def __repr__(self) -> str:
        cuts = [None if cut is None else list(cut.bounds) for cut in self.cuts]
        return f"Layout(shape={list(self.shape)}, cuts={cuts}, rank {self.grid.index} of {self.grid.size})"

    def __reduce__(self) -> tuple:
        return layout_of, (self.shape, self.cuts, self.grid)

    def __deepcopy__(self, memo: dict) -> Layout:
        return self


_SINGLE_RANK_LAYOUTS: dict[Grid, dict] = {}
CACHE_SIZE = 16384
"""Most layouts that stay in the cache though no tensor has them; images may have a new size in every step."""
_LAYOUTS: dict[tuple, Layout] = {}
_EVICTED: WeakValueDictionary[tuple, Layout] = WeakValueDictionary()
"""Layouts that left the cache and that tensors may still have.  Equal layouts must remain one object: ranks empty their caches
at different times, and two objects would send them different ways."""


def layout_of(shape: tuple[int, ...], cuts: Cuts, grid: Grid) -> Layout:
    """The Layout of a shape with these cuts; a cut into one tile becomes None.  AssertionError: cuts that do not fit."""
    found = _LAYOUTS.get((shape, cuts, grid))
    if found is not None:
        return found
    cuts = tuple(None if cut is None or len(cut.bounds) == 2 else cut for cut in cuts)
    key = (shape, cuts, grid)
    found = _LAYOUTS.get(key)
    if found is None:
        assert len(cuts) == len(shape), f"{len(cuts)} cuts for {len(shape)} dims of {shape}"
        for extent, cut in zip(shape, cuts, strict=True):
            fits = cut is None or (
                cut.bounds[0] == 0 and cut.bounds[-1] == extent and len(cut.bounds) == grid.num_shards(cut.axes) + 1
            )
            assert fits, f"cut {cut} does not fit {extent} of {shape} on {grid.sizes}"
        if len(_LAYOUTS) >= CACHE_SIZE:
            _EVICTED.update(_LAYOUTS)
            _LAYOUTS.clear()
        found = _LAYOUTS[key] = _EVICTED.get(key) or Layout(shape, cuts, grid)
    return found


def uncut(shape: tuple[int, ...], grid: Grid) -> Layout:
    """The layout of a tensor that every rank has whole."""
    return layout_of(shape, (None,) * len(shape), grid)
