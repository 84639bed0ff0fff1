"""Outlines of labels: filled again they are the labels, each is one region of pixels, and rings are valid polygons."""

from __future__ import annotations

import numpy as np
import pytest

from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.outlines.filling import filled, polygon
from widefield.outlines.tracing import Outline, traced


def regions_of(labels: np.ndarray, *, strip: int = 2**20, keep=lambda numbers: numbers != 9) -> list[Outline]:
    return list(traced(lambda box: labels[slices(box)], labels.shape, keep=keep, strip_pixels=strip))


def filled_again(regions: list[Outline], size: tuple[int, int]) -> np.ndarray:
    window = Interval(0, size[0]), Interval(0, size[1])
    return filled([polygon(one.number, one.rings) for one in regions], window, outside=9, dtype="uint8")


def drawn(kind: str, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if kind == "noise":
        return random.integers(0, 3, (41, 53)).astype(np.uint8)
    if kind == "blocks":
        return np.kron(random.integers(0, 4, (9, 8)), np.ones((5, 7), int)).astype(np.uint8)
    if kind == "chequered":
        return (np.indices((12, 13)).sum(0) % 2).astype(np.uint8)
    if kind == "nodata":
        return np.where(random.random((30, 31)) < 0.3, 9, random.integers(0, 2, (30, 31))).astype(np.uint8)
    return {"one": np.zeros((1, 1)), "row": np.array([[0, 1, 1, 0]]), "all": np.ones((6, 4))}[kind].astype(np.uint8)


KINDS = ["noise", "blocks", "chequered", "nodata", "one", "row", "all"]


@pytest.mark.parametrize("kind", KINDS)
def test_filled_again_they_are_the_labels(kind):
    labels = drawn(kind)
    assert np.array_equal(filled_again(regions_of(labels), labels.shape), labels)


@pytest.mark.parametrize("strip", [1, 60, 200, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_strips_do_not_show(kind, strip):
    labels = drawn(kind, 1)
    expected, found = regions_of(labels), regions_of(labels, strip=strip)
    assert [one.number for one in found] == [one.number for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert len(one.rings) == len(other.rings) and all(map(np.array_equal, one.rings, other.rings))


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_what_touches_along_edges(kind):
    """Counted by SciPy, one number at a time."""
    from scipy.ndimage import label

    labels = drawn(kind, 2)
    regions = regions_of(labels)
    for number in np.unique(labels[labels != 9]):
        parts, count = label(labels == number)
        own = [one for one in regions if one.number == number]
        assert len(own) == count
        for one in own:
            mine = filled_again([one], labels.shape) != 9
            (which,) = np.unique(parts[mine])
            assert np.array_equal(mine, parts == which)


def area(ring: np.ndarray) -> int:
    after = np.roll(ring, -1, axis=0)
    return int((ring[:, 0] * after[:, 1] - after[:, 0] * ring[:, 1]).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_rings_pass_no_point_twice_and_turn_at_each(kind):
    for one in regions_of(drawn(kind, 3)):
        assert area(one.rings[0]) > 0 and all(area(hole) < 0 for hole in one.rings[1:])
        for ring in one.rings:
            assert len(np.unique(ring, axis=0)) == len(ring) >= 4
            steps = np.roll(ring, -1, axis=0) - ring
            assert ((steps == 0).sum(1) == 1).all(), "not along the edges of pixels"
            assert ((steps == 0)[:, 0] != np.roll(steps == 0, -1, axis=0)[:, 0]).all(), "a corner without a turn"


def test_a_region_that_encloses_another_at_a_point_has_a_hole_that_touches():
    """By hand: a ring of pixels around one, which touches the outside at a corner."""
    labels = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=np.uint8)
    (ring,) = (one for one in regions_of(labels) if one.number == 1)
    assert ring.rings[0].tolist() == [[0, 0], [3, 0], [3, 2], [2, 2], [2, 3], [0, 3]]
    assert sorted(ring.rings[1].tolist()) == [[1, 1], [1, 2], [2, 1], [2, 2]]


def test_rasterio_finds_the_same_polygons():
    features = pytest.importorskip("rasterio.features")
    labels = drawn("noise", 4)
    theirs = sorted((int(number), _points(shape["coordinates"])) for shape, number in features.shapes(labels))
    ours = sorted((one.number, _points(one.rings)) for one in regions_of(labels, keep=lambda numbers: numbers >= 0))
    assert ours == theirs


def _points(rings) -> list[tuple[float, float]]:
    """The corners of all rings; rasterio's repeat the first, and may pass a point twice where a region touches itself."""
    return sorted({(float(x), float(y)) for ring in rings for x, y in ring})


def test_more_corners_than_memory_should_hold_are_refused(monkeypatch):
    monkeypatch.setattr("widefield.outlines.tracing.MOST_CORNERS", 1000)
    with pytest.raises(
        ValueError, match=r"of the first \d+ of 41 rows have [\d,]+ corners, and at most 1,000 are held in memory"
    ):
        regions_of(drawn("noise"), strip=200)


def test_no_more_than_a_strip_is_read_at_a_time():
    labels, asked = drawn("noise"), []

    def read(box):
        asked.append(len(box[0]))
        return labels[slices(box)]

    list(traced(read, labels.shape, keep=lambda numbers: numbers >= 0, strip_pixels=53 * 4))
    assert max(asked) == 4 + 2
