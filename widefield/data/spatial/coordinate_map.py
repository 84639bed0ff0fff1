"""From which position of the source does each pixel of the output come?  Float64, absolute coordinates, no image.

A position is (row, column); pixel centers are whole numbers, so an image of extent n reaches from -0.5 to n - 0.5.  A map is a
chain, applied from its end: 3 x 3 matrices of (row, column, 1), and elastic displacements, which are functions of the output
pixel.  All is elementwise with a fixed order of operations: the bits of a position do not depend on the window asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from widefield.data.spatial.elastic import Elastic
from widefield.geometry.interval import Interval

Array = np.ndarray[Any, Any]
Span = tuple[float, float]
"""The least and the greatest coordinate."""

_ROUNDING_PX = 1e-6
"""Far above the rounding of positions in float64 and far below a pixel: source boxes are wider by this."""
_SNAP = 1e-9
"""Matrices this close to whole numbers move pixels to pixels: a rotation by 90 degrees has a cosine of 6e-17."""

_BEHIND = -1e15
"""The position of pixels behind a perspective's horizon: far outside of any image."""


@dataclass(frozen=True)
class SpatialMove:
    """What one transform does: to an output of `size` (H, W), pixels come from where `element` says."""

    size: tuple[int, int]
    element: Array | Elastic


@dataclass(frozen=True)
class Placement:
    """Pixels that come from pixels: source[axis] of output pixel q is sign[axis] * q[of[axis]] + start[axis]."""

    of: tuple[int, int]
    sign: tuple[int, int]
    start: tuple[int, int]


@dataclass(frozen=True)
class CoordinateMap:
    """source, output: (H, W).  chain: alternating matrices and displacements; see the top."""

    source: tuple[int, int]
    output: tuple[int, int]
    chain: tuple[Array | Elastic, ...]

    def positions(self, y: Array, x: Array) -> tuple[Array, Array]:
        """Source rows and columns of the output pixels in rows `y` (n,) and columns `x` (m,), which ascend.

        They broadcast to (n, m); where rows depend on rows alone, they are (n, 1) and (1, m).
        """
        at: tuple[Array, Array] = (y[:, None], x[None])
        for element in reversed(self.chain):
            if isinstance(element, Elastic):
                moved = element.displacement(y, x)
                at = (at[0] + moved[0], at[1] + moved[1])
            else:
                at = _times(element, *at)
        return at

    def reach(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        """Spans of source positions that contain those of all output positions in the given spans."""
        spans = (rows, columns)
        for element in reversed(self.chain):
            if isinstance(element, Elastic):
                spans = _widened(spans[0], element.most_px[0]), _widened(spans[1], element.most_px[1])
            else:
                spans = _hull(element, spans)
        return _widened(spans[0], _ROUNDING_PX), _widened(spans[1], _ROUNDING_PX)

    @property
    def is_identity(self) -> bool:
        """Whether nothing was to move."""
        return not self.chain

    @property
    def placement(self) -> Placement | None:
        """Where every pixel comes from exactly one pixel (flips, turns by 90 degrees, crops): which; else None."""
        if any(isinstance(element, Elastic) for element in self.chain):
            return None
        matrix = self.chain[0] if self.chain else np.eye(3)
        whole = np.round(matrix)
        linear = whole[:2, :2]
        if np.abs(matrix - whole).max() > _SNAP or (whole[2] != (0, 0, 1)).any():
            return None
        if sorted(np.abs(linear).ravel()) != [0, 0, 1, 1] or (np.abs(linear).sum(0) != 1).any():
            return None
        of = (0, 1) if linear[0, 0] else (1, 0)
        sign = (int(linear[0, of[0]]), int(linear[1, of[1]]))
        return Placement(of, sign, (int(whole[0, 2]), int(whole[1, 2])))

    @property
    def is_separable(self) -> bool:
        """Whether rows depend on rows alone and columns on columns, as where an image is resized."""
        matrices = [element for element in self.chain if not isinstance(element, Elastic)]
        straight = all((one[2] == (0, 0, 1)).all() and one[0, 1] == one[1, 0] == 0 for one in matrices)
        return straight and len(matrices) == len(self.chain)

    @property
    def shrinking(self) -> tuple[float, float]:
        """How many source pixels a step of one output row and of one output column goes, at the output's center."""
        matrix = np.eye(3)
        for element in self.chain:
            if not isinstance(element, Elastic):
                matrix = matrix @ element
        center = [(extent - 1) / 2 for extent in self.output]
        (down, across), _ = steps_of(matrix, center)
        return down, across


def composed(source: tuple[int, int], moves: list[SpatialMove]) -> CoordinateMap:
    """The map of moves that are made one after the other on an image of `source` (H, W)."""
    chain: list[Array | Elastic] = []
    for move in moves:
        if isinstance(move.element, Elastic) or not chain or isinstance(chain[-1], Elastic):
            chain.append(move.element)
        else:
            chain[-1] = chain[-1] @ move.element
    return CoordinateMap(source, moves[-1].size if moves else source, tuple(_on_output(chain)))


def undone(map: CoordinateMap) -> CoordinateMap:
    """The map from the output back to the source, as for predictions that are to lie on the image's own pixels.

    NotImplementedError: displacements, which have no inverse in closed form.
    """
    if any(isinstance(element, Elastic) for element in map.chain):
        raise NotImplementedError("an elastic displacement cannot be undone in closed form; leave ElasticTransform out")
    return CoordinateMap(map.output, map.source, tuple(np.linalg.inv(element) for element in reversed(map.chain)))


def steps_of(matrix: Array, at: list[float]) -> tuple[tuple[float, float], Array]:
    """How far a step of one row and of one column goes at a position, and the matrix (2, 2) of the steps."""
    y, x, w = matrix @ np.array([*at, 1.0])
    linear = (matrix[:2, :2] - np.outer((y / w, x / w), matrix[2, :2])) / w
    return (float(np.hypot(*linear[:, 0])), float(np.hypot(*linear[:, 1]))), linear


def _on_output(chain: list[Array | Elastic]) -> list[Array | Elastic]:
    """Displacements as functions of the output's pixels: their spacing in pixels of the place in the list where they stand.

    A displacement is the same in distribution everywhere, so that it may follow the output's grid however that is turned.
    """
    after, found = np.eye(3), []
    for element in reversed(chain):
        if isinstance(element, Elastic):
            (down, across), _ = steps_of(after, [0.0, 0.0])
            spacing = (element.spacing_px[0] / max(down, 1e-6), element.spacing_px[1] / max(across, 1e-6))
            found.append(Elastic(element.seed, element.most_px, spacing))
        else:
            after = element @ after
            found.append(element)
    return found[::-1]


def _times(matrix: Array, y: Array, x: Array) -> tuple[Array, Array]:
    rows, columns, depth = (_line(line, y, x) for line in matrix.tolist())
    if matrix[2].tolist() == [0.0, 0.0, 1.0]:
        return rows, columns
    depth = np.where(depth > 0, depth, np.nan)
    return np.nan_to_num(rows / depth, nan=_BEHIND), np.nan_to_num(columns / depth, nan=_BEHIND)


def _line(line: list[float], y: Array, x: Array) -> Array:
    """line . (y, x, 1); without a factor of 0, the smaller shape of what is left."""
    down, across, constant = line
    if across == 0:
        return down * y + constant
    return across * x + constant if down == 0 else (down * y + constant) + across * x


def _hull(matrix: Array, spans: tuple[Span, Span]) -> tuple[Span, Span]:
    """Of the mapped corners; without end where a perspective has its horizon between them."""
    y, x = np.array(spans[0])[:, None], np.array(spans[1])[None]
    if (_line(matrix[2].tolist(), y, x) <= 0).any():
        return (-np.inf, np.inf), (-np.inf, np.inf)
    rows, columns = _times(matrix, y, x)
    return (float(rows.min()), float(rows.max())), (float(columns.min()), float(columns.max()))


def _widened(span: Span, by: float) -> Span:
    return span[0] - by, span[1] + by


def pixels_of(run: Interval) -> Array:
    """The pixels of an interval as float64."""
    return np.arange(run.start, run.stop, dtype=np.float64)
