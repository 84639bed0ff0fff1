"""Where does each pixel of a whole live?  Grid: the ranks of one image.  Layout: a whole's shape and its cuts over them.

Integers only.  Layouts are interned: equal ones are the same object, so that `is` compares them and results of the
arithmetic can be kept under them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple
from weakref import WeakValueDictionary

from widefield.geometry.box import Box, size_of
from widefield.geometry.interval import Interval, even_cut


@dataclass(frozen=True)
class Grid:
    """The ranks that hold one image: `sizes` per space axis, ranks in row-major order.

    index: this rank's place.  groups: names of torch's process groups, one per set of axes larger than 1, ascending.
    """

    sizes: tuple[int, ...]
    index: int = 0
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()

    @cached_property
    def size(self) -> int:
        return math.prod(self.sizes)

    def coordinate(self, index: int) -> tuple[int, ...]:
        """Place of a rank on each axis."""
        place = []
        for size in reversed(self.sizes):
            index, at = divmod(index, size)
            place.append(at)
        return tuple(reversed(place))

    def num_shards(self, axes: tuple[int, ...]) -> int:
        """How many ranks stand along these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place_on(self, axes: tuple[int, ...], index: int) -> int:
        """Which tile, among those cut along `axes` in that order, rank `index` holds."""
        coordinate, place = self.coordinate(index), 0
        for axis in axes:
            place = place * self.sizes[axis] + coordinate[axis]
        return place

    def group_name(self, axes: tuple[int, ...]) -> str:
        """The process group of the ranks that differ from this one in `axes` alone."""
        used = tuple(sorted(axis for axis in axes if self.sizes[axis] > 1))
        return dict(self.groups)[used]

    def names(self) -> tuple[tuple[int, ...], ...]:
        """Every set of axes that wants a group."""
        large = [axis for axis, size in enumerate(self.sizes) if size > 1]
        picks = product((False, True), repeat=len(large))
        return tuple(sorted(chosen for pick in picks if (chosen := tuple(a for a, p in zip(large, pick, strict=True) if p))))


class Cut(NamedTuple):
    """One dim cut along `axes` of the grid (several: in row-major order) at `bounds`, e.g. (0, 35, 64)."""

    axes: tuple[int, ...]
    bounds: tuple[int, ...]


Cuts = tuple[Cut | None, ...]


class Layout:
    """A whole's shape and, for each of its dims, the Cut or None; `box` is what this rank holds.  Make them by `layout_of`."""

    __slots__ = (
        "shape", "cuts", "grid", "box", "tile_shape", "is_cut", "axes", "num_shards", "is_empty", "strides", "alone",
        "_boxes", "_sources", "_is_thin", "_dims_told", "__weakref__",
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
        self._dims_told: list[int] | None = None
        self.strides: dict = {}
        self.alone: dict | None = _ALONE.setdefault(grid, {}) if grid.size == 1 else None
        """Of a grid of one rank, its layouts by shape: there every operation is the plain one."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What each rank holds; made when it is asked for, as a stream's grid has thousands of places."""
        if self._boxes is None:
            self._boxes = tuple(self.box_of(rank) for rank in range(self.grid.size))
        return self._boxes

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each rank those that stand where it does along the axes that cut nothing: one of each tile."""
        if self._sources is None:
            grid = self.grid
            others = tuple(axis for axis in range(len(grid.sizes)) if axis not in self.axes)
            alike = [grid.place_on(others, rank) for rank in range(grid.size)]
            self._sources = tuple(tuple(q for q in range(grid.size) if alike[q] == alike[r]) for r in range(grid.size))
        return self._sources

    @property
    def is_thin(self) -> bool:
        """Whether a rank has fewer than two pixels on a dim, and than there are: strides do not tell where that dim lies."""
        if self._is_thin is None:
            pairs = [pair for box in self.boxes for pair in zip(box, self.shape, strict=True)]
            self._is_thin = any(len(interval) < min(2, extent) for interval, extent in pairs)
        return self._is_thin

    @property
    def dims_told(self) -> list[int]:
        """The dims of which every rank has two pixels or more, so that tiles tell where they lie; none where some are empty."""
        if self._dims_told is None:
            least = [min(len(box[dim]) for box in self.boxes) for dim in range(len(self.shape))]
            self._dims_told = [dim for dim, pixels in enumerate(least) if pixels > 1] if all(least) else []
        return self._dims_told

    def box_of(self, rank: int) -> Box:
        """What a rank holds."""
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

    def dims_of(self, axis: int) -> int | None:
        """The dim that is cut along a grid axis."""
        return next((dim for dim, cut in enumerate(self.cuts) if cut is not None and axis in cut.axes), None)


_ALONE: dict[Grid, dict] = {}
KEPT_MOST = 16384
"""How many layouts are kept though no tensor has them, for images whose size is new in every step."""
_LAYOUTS: dict[tuple, Layout] = {}
_OLD: WeakValueDictionary[tuple, Layout] = WeakValueDictionary()
"""Those that tensors may still have: two that are equal are one, for ranks that forget at different times would disagree."""


def layout_of(shape: tuple[int, ...], cuts: Cuts, grid: Grid) -> Layout:
    """The Layout of a shape with these cuts; a cut into one tile is none.  AssertionError: cuts that do not fit."""
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
        if len(_LAYOUTS) >= KEPT_MOST:
            _OLD.update(_LAYOUTS)
            _LAYOUTS.clear()
        found = _LAYOUTS[key] = _OLD.get(key) or Layout(shape, cuts, grid)
    return found


def uncut(shape: tuple[int, ...], grid: Grid) -> Layout:
    """The layout of a whole that every rank holds."""
    return layout_of(shape, (None,) * len(shape), grid)


def even_cuts(shape: tuple[int, ...], dims: dict[int, tuple[int, ...]], grid: Grid) -> Cuts:
    """Cut `dims` (dim -> axes) of `shape` evenly."""
    cuts: list[Cut | None] = [None] * len(shape)
    for dim, axes in dims.items():
        cuts[dim] = Cut(axes, even_cut(shape[dim], grid.num_shards(axes)))
    return tuple(cuts)
