"""The outlines of labels: for each connected region the polygon of its pixels' edges, exactly.

Pixels of one number that share an edge are of one region.  Labels are read some rows at a time; what is kept of them are the
corners at which an outline turns, so memory is bounded by the outlines.

How: each side of a region (top, right, bottom, left) consists of straight segments.  Going around with the region at the right
hand, a segment runs from a corner to a corner, and every corner ends one segment and begins another.  At a corner the outline
turns around a pixel of the region (convex) or around one outside (concave); which of both, the three pixels around tell.  Along
a row, or a column, segments of one side do not overlap, so their sorted beginnings and ends belong to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval, pieces_of

Array = np.ndarray[Any, Any]
STRIP_PIXELS = 2**20
"""That are looked at together."""
MOST_CORNERS = 2**26
"""Of all outlines, some 60 bytes each."""
# the corners of a pixel, convex ones first: top left, top right, bottom right, bottom left
_DOWN, _RIGHT = np.array([0, 0, 1, 1] * 2), np.array([0, 1, 1, 0] * 2)
_SIDES = (((0, 5), (1, 4), "row"), ((1, 6), (2, 5), "column"), ((2, 7), (3, 6), "row"), ((3, 4), (0, 7), "column"))
"""Top, right, bottom, left: the kinds of corner that begin a segment, those that end one, and along what it runs."""


@dataclass(frozen=True)
class Outline:
    """number: of its pixels.  rings: (N, 2) integers (x, y), the outer one first, then holes; none repeats its first point.

    By the numbers alone the outer ring is counterclockwise and holes are clockwise; on a screen, where y points down, it is the
    other way round.  Those of a box may lie between pixels.
    """

    number: int
    rings: tuple[Array, ...]
    properties: Mapping[str, float] = field(default_factory=dict)
    """What else is known of it."""


@dataclass(frozen=True)
class _Corners:
    """Arrays of one length: kind, x and y; region: of the pixels; number: their label."""

    kind: Array
    x: Array
    y: Array
    region: Array
    number: Array

    def take(self, index: Array) -> _Corners:
        return _Corners(self.kind[index], self.x[index], self.y[index], self.region[index], self.number[index])


def traced(
    read: Callable[[Box], Array], size: tuple[int, int], *, keep: Callable[[Array], Array], strip_pixels: int = STRIP_PIXELS
) -> Iterator[Outline]:
    """The regions of labels of `size`, by their first pixel in reading order.

    read: the labels in a box.  keep: which numbers have outlines, elementwise; others lie outside.
    ValueError: there are more corners than MOST_CORNERS.
    """
    corners = _corners_of(read, size, keep, max(1, strip_pixels // max(1, size[1])))
    following = _following(corners, size)
    order, stops = _rings(following)
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    x, y = corners.x[order], corners.y[order]
    areas = _areas(x, y, starts, stops)
    first = order[starts] if len(starts) else starts
    by_region = np.lexsort((first, areas < 0, corners.region[first]))
    ring_region = corners.region[first][by_region]
    breaks = np.flatnonzero(np.diff(ring_region, prepend=-1)) if len(by_region) else np.zeros(0, dtype=np.int64)
    outer = by_region[breaks]
    ends = np.append(breaks[1:], len(by_region))
    for place in np.argsort(first[outer], kind="stable"):
        rings = by_region[breaks[place] : ends[place]]
        found = tuple(np.stack([x[starts[ring] : stops[ring]], y[starts[ring] : stops[ring]]], 1) for ring in rings)
        yield Outline(int(corners.number[first[outer[place]]]), found)


# ---------------------------------------------------------------------------------------------- corners, strip by strip


def _corners_of(read: Callable[[Box], Array], size: tuple[int, int], keep: Callable[[Array], Array], rows: int) -> _Corners:
    """All corners, in reading order, with the regions that they are of in the whole."""
    height, width = size
    found: list[_Corners] = []
    links: list[Array] = []
    count, corners_so_far, above = 0, 0, np.zeros(0, dtype=np.int64)
    for strip in pieces_of(Interval(0, height), rows):
        around = _read_around(read, size, strip, keep)
        regions, new = _regions_in(around)
        regions += count
        count += new
        if len(above):
            same = around[0, 1:-1] == around[1, 1:-1]
            links.append(np.unique(np.stack([above[same], regions[0][same]]), axis=1))
        above = regions[-1].copy()
        found.append(_corners_in(around, regions, strip.start))
        corners_so_far += len(found[-1].kind)
        if corners_so_far > MOST_CORNERS:
            raise ValueError(
                f"the outlines of the first {strip.stop:,} of {height:,} rows have {corners_so_far:,} corners, and at most "
                f"{MOST_CORNERS:,} are held in memory; leave --outlines out"
            )
    joined = _joined(np.concatenate(links, axis=1) if links else np.zeros((2, 0), dtype=np.int64), count)
    fields = (np.concatenate([getattr(one, name) for one in found]) for name in ("kind", "x", "y", "region", "number"))
    corners = _Corners(*fields)
    corners = corners.take(np.lexsort((corners.kind, corners.x, corners.y)))
    return _Corners(corners.kind, corners.x, corners.y, joined[corners.region], corners.number)


def _read_around(read: Callable[[Box], Array], size: tuple[int, int], rows: Interval, keep: Callable[[Array], Array]) -> Array:
    """Labels of some rows and one pixel around, as int32; -1 outside of the image, and where nothing is traced."""
    height, width = size
    box = Interval(max(0, rows.start - 1), min(height, rows.stop + 1))
    labels = read((box, Interval(0, width)))
    around = np.full((len(rows) + 2, width + 2), -1, dtype=np.int32)
    top = box.start - rows.start + 1
    around[top : top + len(box), 1:-1] = np.where(keep(labels), labels.astype(np.int32), np.int32(-1))
    return around


def _corners_in(around: Array, regions: Array, first_row: int) -> _Corners:
    """The corners of the pixels within, which `regions` has.  first_row: of these in the whole."""
    own = around[1:-1, 1:-1]
    steps = [((-1, 0), (0, -1)), ((-1, 0), (0, 1)), ((1, 0), (0, 1)), ((1, 0), (0, -1))]  # to the two beside each corner
    parts = []
    for corner, (vertical, horizontal) in enumerate(steps):
        beside = _shifted(around, *vertical) == own, _shifted(around, *horizontal) == own
        across = _shifted(around, vertical[0], horizontal[1]) == own
        for kind, where in ((corner, ~beside[0] & ~beside[1]), (corner + 4, beside[0] & beside[1] & ~across)):
            rows, columns = np.nonzero(where & (own >= 0))
            x, y = columns + _RIGHT[kind], rows + first_row + _DOWN[kind]
            kinds = np.full(len(rows), kind, dtype=np.int8)
            parts.append((kinds, x.astype(np.int32), y.astype(np.int32), regions[rows, columns], own[rows, columns]))
    return _Corners(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _shifted(around: Array, down: int, right: int) -> Array:
    """The neighbours of the pixels within."""
    return around[1 + down : around.shape[0] - 1 + down, 1 + right : around.shape[1] - 1 + right]


def _regions_in(around: Array) -> tuple[Array, int]:
    """Numbers of the connected regions of the pixels within, from 0 on, and how many there are."""
    own = around[1:-1, 1:-1]
    begins = _shifted(around, 0, -1) != own
    begins[:, 0] = True
    runs = np.cumsum(begins.ravel()).reshape(begins.shape) - 1
    touch = (own[1:] == own[:-1]) & (begins[1:] | begins[:-1])  # where runs that touch begin to do so
    joined = _joined(np.stack([runs[:-1][touch], runs[1:][touch]]), int(runs[-1, -1]) + 1)
    return joined[runs], int(joined.max()) + 1


def _joined(links: Array, count: int) -> Array:
    """For each of `count` numbers that of its group.  links: (2, N) numbers that are of one group."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(links.shape[1], dtype=bool), (links[0], links[1])), shape=(count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


# ---------------------------------------------------------------------------------------------- rings


def _following(corners: _Corners, size: tuple[int, int]) -> Array:
    """For each corner the next one of its outline."""
    following = np.empty(len(corners.kind), dtype=np.int64)
    along = {
        "row": corners.y.astype(np.int64) * (size[1] + 1) + corners.x,
        "column": corners.x.astype(np.int64) * (size[0] + 1) + corners.y,
    }
    for begin, end, which in _SIDES:
        starts, stops = (np.flatnonzero(np.isin(corners.kind, kinds)) for kinds in (begin, end))
        starts, stops = (one[np.argsort(along[which][one], kind="stable")] for one in (starts, stops))
        following[starts] = stops
    _part_where_touching(following, corners, along["row"])
    return following


def _part_where_touching(following: Array, corners: _Corners, place: Array) -> None:
    """Where a region touches itself at a point, the outline goes straight over to the pixel across.

    So no ring passes a point twice: what is enclosed there is a hole that touches the outer ring, which is a valid polygon.
    """
    convex = np.flatnonzero(corners.kind < 4)
    convex = convex[np.lexsort((corners.region[convex], place[convex]))]
    same = (np.diff(place[convex]) == 0) & (np.diff(corners.region[convex]) == 0)
    one, other = convex[:-1][same], convex[1:][same]
    following[one], following[other] = following[other], following[one].copy()


def _rings(following: Array) -> tuple[Array, Array]:
    """The corners ring by ring, each from its first corner on, and where each ring ends."""
    after, seen = following.tolist(), bytearray(len(following))
    order: list[int] = []
    stops: list[int] = []
    for first in range(len(after)):
        at = first
        if seen[first]:
            continue
        while not seen[at]:
            seen[at] = 1
            order.append(at)
            at = after[at]
        stops.append(len(order))
    return np.array(order, dtype=np.int64), np.array(stops, dtype=np.int64)


def _areas(x: Array, y: Array, starts: Array, stops: Array) -> Array:
    """Twice the signed area of each ring, by the shoelace formula."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    after = np.arange(1, len(x) + 1)
    after[stops - 1] = starts
    x, y = x.astype(np.int64), y.astype(np.int64)
    return np.add.reduceat(x * y[after] - x[after] * y, starts)
