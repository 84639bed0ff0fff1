"""The labels of a window from polygons: a pixel has the number of the last polygon that its centre is in.

A line of pixel centres crosses the edges of a polygon; between the first and the second crossing, the third and the fourth, and
so on, it is inside (even-odd).  Crossings are computed in pixels of the whole, so a window has the same labels to the bit as
the whole has there.  GDAL's rasterize does the same without ALL_TOUCHED; a centre on an edge is in the polygon at its left, or
below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from widefield.geometry.interval import Interval, pieces_of

Array = np.ndarray[Any, Any]
BAND_PIXELS = 2**22
"""Of a polygon's rows that are filled at once."""


@dataclass(frozen=True)
class Polygon:
    """number: of the pixels inside.  edges: (N, 4) float64, each from (x, y) to (x, y) with y not falling, of all rings."""

    number: int
    edges: Array

    @cached_property
    def extent(self) -> tuple[float, float, float, float]:
        """left, top, right, bottom."""
        x, y = self.edges[:, 0::2], self.edges[:, 1::2]
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())


def polygon(number: int, rings: Sequence[Array]) -> Polygon:
    """rings: (N, 2) points (x, y), closed or not."""
    parts = [np.concatenate([ring, np.roll(ring, -1, axis=0)], axis=1) for ring in map(np.asarray, rings)]
    edges = np.concatenate(parts).astype(np.float64)
    falling = edges[:, 1] > edges[:, 3]
    edges[falling] = edges[falling][:, [2, 3, 0, 1]]
    return Polygon(number, edges)


def filled(polygons: Sequence[Polygon], window: tuple[Interval, Interval], *, outside: int, dtype: str) -> Array:
    """The labels of a window of rows and columns; `outside` where no polygon is.  Later polygons are over earlier ones."""
    labels = np.full([len(one) for one in window], outside, dtype=dtype)
    for one in polygons:
        _fill(one, labels, window)
    return labels


def _fill(one: Polygon, labels: Array, window: tuple[Interval, Interval]) -> None:
    left, top, right, bottom = one.extent
    rows = window[0] & Interval(int(max(np.floor(top), -1)), int(min(np.ceil(bottom), window[0].stop)) + 1)
    columns = window[1] & Interval(int(max(np.floor(left), -1)), int(min(np.ceil(right), window[1].stop)) + 1)
    if rows.stop <= rows.start or columns.stop <= columns.start:
        return
    step = max(1, BAND_PIXELS // len(columns))
    for band in pieces_of(rows, step):
        inside = _inside(one.edges, band, columns)
        part = labels[band.start - window[0].start :, columns.start - window[1].start :][: len(band), : len(columns)]
        part[inside] = one.number


def _inside(edges: Array, rows: Interval, columns: Interval) -> Array:
    """bool: which of the pixels have their centre inside."""
    first = np.maximum(np.ceil(edges[:, 1] - 0.5), rows.start).astype(np.int64)
    stop = np.minimum(np.ceil(edges[:, 3] - 0.5), rows.stop).astype(np.int64)
    crossed = np.flatnonzero(stop > first)
    counts = (stop - first)[crossed]
    index = np.repeat(crossed, counts)
    at = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first[crossed], counts)
    x0, y0, x1, y1 = edges[index].T
    x = (at + 0.5 - y0) * (x1 - x0) / (y1 - y0) + x0
    column = np.clip(np.floor(x + 0.5), columns.start, columns.stop).astype(np.int64) - columns.start
    width = len(columns) + 1
    crossings = np.bincount((at - rows.start) * width + column, minlength=len(rows) * width).reshape(len(rows), width)
    return (np.cumsum(crossings[:, :-1], axis=1) & 1).astype(bool)
