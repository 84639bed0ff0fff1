"""Where points and boxes of the source go: the inverse of a map."""

from __future__ import annotations

import numpy as np

from widefield.data.spatial.coordinate_map import Array, CoordinateMap, steps_of
from widefield.data.spatial.elastic import Elastic

_ROUNDS = 100
_CLOSE_PX = 1e-9
_POINTS_PER_SIDE = 8


def moved_points(map: CoordinateMap, points_N2: Array) -> Array:
    """The output positions (row, column), float64, of source positions; pixel centers are whole numbers.

    The inverse of the matrices, corrected until the map leads back, since displacements have no inverse in closed form.
    """
    matrix = np.eye(3)
    for element in map.chain:
        if not isinstance(element, Elastic):
            matrix = matrix @ element
    inverse = np.linalg.inv(matrix)
    found = _through(inverse, np.asarray(points_N2, dtype=np.float64).reshape(-1, 2))
    if not any(isinstance(element, Elastic) for element in map.chain):
        return found
    for number, wanted in enumerate(points_N2):
        at = found[number]
        for _ in range(_ROUNDS):
            shown = np.array([float(one.ravel()[0]) for one in map.positions(at[:1], at[1:])])
            step = np.linalg.solve(steps_of(matrix, at.tolist())[1], wanted - shown)
            at = at + step
            if np.abs(step).max() < _CLOSE_PX:
                break
        found[number] = at
    return found


def moved_boxes(map: CoordinateMap, boxes_N4: Array, *, keep: float = 0.0) -> tuple[Array, Array]:
    """The boxes (x1, y1, x2, y2) of the output, in edges, of those of the source: the hulls of their sides, cut to the image.

    keep: a box is left out where less than this share of its hull is in the output.  Returns boxes (M, 4) and the numbers (M,)
    of those that are left.
    """
    found, numbers = [], []
    for number, box in enumerate(np.asarray(boxes_N4, dtype=np.float64)):
        hull = _hull(moved_points(map, _outline(box) - 0.5) + 0.5)
        cut = np.array([*np.clip(hull[:2], 0, None), *np.minimum(hull[2:], (map.output[1], map.output[0]))])
        area = (hull[2] - hull[0]) * (hull[3] - hull[1])
        left = max(0.0, cut[2] - cut[0]) * max(0.0, cut[3] - cut[1])
        if left > 0 and left >= keep * area:
            found.append(cut)
            numbers.append(number)
    return np.array(found).reshape(-1, 4), np.array(numbers, dtype=np.int64)


def _outline(box: Array) -> Array:
    """Points (row, column) on the sides of a box, its corners among them."""
    x1, y1, x2, y2 = box
    share = np.linspace(0, 1, _POINTS_PER_SIDE)
    xs, ys = x1 + (x2 - x1) * share, y1 + (y2 - y1) * share
    sides = [(np.full_like(xs, y1), xs), (np.full_like(xs, y2), xs), (ys, np.full_like(ys, x1)), (ys, np.full_like(ys, x2))]
    return np.concatenate([np.stack(side, axis=1) for side in sides])


def _hull(points_N2: Array) -> Array:
    (top, left), (bottom, right) = points_N2.min(0), points_N2.max(0)
    return np.array([left, top, right, bottom])


def _through(matrix: Array, points_N2: Array) -> Array:
    """Number by number, so that a point's bits do not depend on how many there are."""
    y, x = points_N2[:, 0], points_N2[:, 1]
    down, across, by = (row[0] * y + row[1] * x + row[2] for row in matrix)
    return np.stack([down / by, across / by], axis=1)
