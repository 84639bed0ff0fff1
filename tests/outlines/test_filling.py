"""Labels of polygons: windows are crops of the whole to the bit, and the whole is what rasterio makes."""

from __future__ import annotations

import numpy as np
import pytest

from widefield.geometry import Interval
from widefield.outlines.filling import BAND_PIXELS, filled, polygon

SIZE = (211, 187)
WHOLE = (Interval(0, SIZE[0]), Interval(0, SIZE[1]))


def rings(seed: int) -> list[tuple[int, list[np.ndarray]]]:
    """Stars of any form, some with a hole, some partly outside, some on the corners and centres of pixels."""
    random, found = np.random.default_rng(seed), []
    for number in range(12):
        centre, count = random.uniform(-20, 220, 2), int(random.integers(3, 40))
        angles = np.sort(random.uniform(0, 2 * np.pi, count))
        reach = random.uniform(5, 70, count)
        star = centre + reach[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
        star = np.rint(2 * star) / 2 if number % 3 == 0 else star
        found.append((number % 5, [star, centre + (star - centre)[::-1] * 0.4] if number % 2 else [star]))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_windows_are_crops_of_the_whole(seed, monkeypatch):
    polygons = [polygon(number, one) for number, one in rings(seed)]
    whole = filled(polygons, WHOLE, outside=7, dtype="uint8")
    monkeypatch.setattr("widefield.outlines.filling.BAND_PIXELS", 500)
    random = np.random.default_rng(seed)
    for _ in range(200):
        starts = [int(random.integers(0, extent)) for extent in SIZE]
        stops = [int(random.integers(start, extent + 1)) for start, extent in zip(starts, SIZE, strict=True)]
        rows, columns = (Interval(start, stop) for start, stop in zip(starts, stops, strict=True))
        found = filled(polygons, (rows, columns), outside=7, dtype="uint8")
        assert np.array_equal(found, whole[starts[0] : stops[0], starts[1] : stops[1]])
    assert BAND_PIXELS > 500 and len(np.unique(whole)) > 4, "too easy"


@pytest.mark.parametrize("seed", range(3))
def test_rasterio_fills_the_same_pixels(seed):
    """Later polygons over earlier ones, all_touched off; also where centres lie on edges."""
    features = pytest.importorskip("rasterio.features")
    shapes = rings(seed)
    closed = [
        ({"type": "Polygon", "coordinates": [[*one.tolist(), one[0].tolist()] for one in some]}, number)
        for number, some in shapes
    ]
    theirs = features.rasterize(closed, SIZE, fill=7, dtype="uint8")
    ours = filled([polygon(number, one) for number, one in shapes], WHOLE, outside=7, dtype="uint8")
    assert np.array_equal(ours, theirs)


def test_a_polygon_by_hand():
    square = np.array([[1.0, 1.0], [3.0, 1.0], [3.0, 2.5], [1.0, 2.5]])
    found = filled([polygon(4, [square])], (Interval(0, 4), Interval(0, 4)), outside=0, dtype="uint8")
    assert found.tolist() == [[0, 0, 0, 0], [0, 4, 4, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    """The centres of its last row lie on its lower edge, y = 2.5: they are of what is below."""


def test_far_away_and_huge_polygons():
    far = polygon(1, [np.array([[1e9, 1e9], [2e9, 1e9], [2e9, 2e9]])])
    huge = polygon(2, [np.array([[-1e12, -1e12], [1e12, -1e12], [1e12, 1e12], [-1e12, 1e12]])])
    window = (Interval(5, 9), Interval(3, 8))
    assert (filled([far], window, outside=0, dtype="uint8") == 0).all()
    assert (filled([far, huge], window, outside=0, dtype="uint8") == 2).all()
