"""A smooth random displacement of positions: a cubic B-spline whose control points are hashes of their place.

So it is a function of absolute positions: any window of it costs as much as its pixels, and no noise is stored or blurred.
The weights of a position are at least 0 and add up to 1, so no displacement exceeds that of the control points: a known halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SPACING_OF_SIGMA = 3**0.5
"""Control points this many sigmas apart: the autocorrelation is as wide as that of noise blurred by a Gaussian of sigma."""
_MOST_OF_ALPHA = 0.2943
"""The mean square displacement is that of torchvision's ElasticTransform: uniform noise in [-1, 1] blurred by a Gaussian has a
standard deviation of 0.1629 / sigma and is multiplied by alpha / 2 pixels; a spline of control points in [-1, 1] has 0.2767."""


@dataclass(frozen=True)
class Elastic:
    """most_px: the largest displacement of rows and columns.  spacing_px: between control points, in output pixels."""

    seed: int
    most_px: tuple[float, float]
    spacing_px: tuple[float, float]

    def displacement(self, y: Array, x: Array) -> tuple[Array, Array]:
        """Rows and columns by which the positions of output rows `y` (n,) and columns `x` (m,) move, each (n, m) float64.

        Elementwise with a fixed order of additions, so that the bits of a position do not depend on the others.
        """
        (first_y, weights_y), (first_x, weights_x) = (
            _taps(at / step) for at, step in zip((y, x), self.spacing_px, strict=True)
        )
        down, across = (np.arange(first[0], first[-1] + 4) for first in (first_y, first_x))
        found = []
        for axis, most in enumerate(self.most_px):
            points = most * _uniform(self.seed, axis, down, across)
            lines = _sum([weight[:, None] * points[first_y - first_y[0] + tap] for tap, weight in enumerate(weights_y)])
            found.append(_sum([weight * lines[:, first_x - first_x[0] + tap] for tap, weight in enumerate(weights_x)]))
        return found[0], found[1]


def elastic_of(seed: int, *, alpha: tuple[float, float], sigma: tuple[float, float]) -> Elastic:
    """Displacements as large and as smooth as those of torchvision's ElasticTransform.  alpha, sigma: of rows and columns."""
    most = (_MOST_OF_ALPHA * alpha[0] / sigma[0], _MOST_OF_ALPHA * alpha[1] / sigma[1])
    return Elastic(seed, most, (_SPACING_OF_SIGMA * sigma[0], _SPACING_OF_SIGMA * sigma[1]))


def _taps(at: Array) -> tuple[Array, list[Array]]:
    """The first of the four control points at each of the ascending positions, and the weights of the four."""
    whole = np.floor(at)
    t = at - whole
    rest = 1 - t
    weights = [
        rest * rest * rest / 6,
        (4 - 6 * (t * t) + 3 * (t * t * t)) / 6,
        (4 - 6 * (rest * rest) + 3 * (rest * rest * rest)) / 6,
        t * t * t / 6,
    ]
    return whole.astype(np.int64) - 1, weights


def _sum(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _uniform(seed: int, axis: int, down: Array, across: Array) -> Array:
    """(rows, columns) numbers in [-1, 1), each a hash of (seed, axis, row, column): SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        state = _mixed(np.uint64(seed) + np.uint64(axis))
        rows = _mixed(state ^ down.astype(np.int64).view(np.uint64))
        bits = _mixed(rows[:, None] ^ across.astype(np.int64).view(np.uint64)[None])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1


def _mixed(state: Any) -> Any:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
