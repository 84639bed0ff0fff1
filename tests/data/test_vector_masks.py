"""Masks that are polygons: on the image's grid, window by window, in its coordinate system; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from polygon_masks import PLACE, SIZE, SQUARE, collection, feature, opened, rasterized, read_all, save, stars, to_world

from widefield.geometry import Interval


def test_polygons_in_pixels_are_what_rasterio_makes(tmp_path):
    trees = [collection([feature(name, ring) for name, ring in stars(number)]) for number in range(3)]
    dataset = opened(save(tmp_path, trees, geotiff=False))
    assert dataset.classes == ["background", "forest", "road", "water"]
    assert "found in polygons; pixels in none are background" in dataset.about
    for name, labels in read_all(dataset).items():
        assert labels.dtype == np.uint8
        assert np.array_equal(labels, rasterized(stars(int(name[-1])), dataset.classes))


@pytest.mark.parametrize("geotiff", [False, True])
def test_windows_are_crops_of_the_whole(tmp_path, geotiff):
    place = to_world if geotiff else lambda points: points
    crs = {"crs": {"type": "name", "properties": {"name": "EPSG:32632"}}} if geotiff else {}
    trees = [collection([feature(name, place(ring)) for name, ring in stars(number)], **crs) for number in range(3)]
    dataset = opened(save(tmp_path, trees, geotiff=geotiff))
    whole = dataset.train.read(0)[1].numpy()
    random = np.random.default_rng(0)
    for _ in range(200):
        starts = [int(random.integers(0, extent)) for extent in SIZE]
        stops = [int(random.integers(start + 1, extent + 1)) for start, extent in zip(starts, SIZE, strict=True)]
        window = tuple(Interval(start, stop) for start, stop in zip(starts, stops, strict=True))
        image, labels = dataset.train.read_window(0, window)
        assert np.array_equal(labels.numpy(), whole[starts[0] : stops[0], starts[1] : stops[1]])
        assert image.shape[1:] == labels.shape
    assert len(np.unique(whole)) == 4, "too easy"


@pytest.mark.parametrize("system", [None, "urn:ogc:def:crs:EPSG::32632", "EPSG:3857", ""], ids=str)
def test_coordinates_are_taken_to_the_system_of_the_image(tmp_path, system):
    """None: longitude and latitude, as GeoJSON is without a crs; "": the image's own, where nothing is known."""
    warp = pytest.importorskip("rasterio.warp")
    import rasterio

    def placed(ring: np.ndarray) -> np.ndarray:
        points = to_world(ring)
        if system == "":
            return points
        x, y = warp.transform("EPSG:32632", "OGC:CRS84" if system is None else system, *points.T.tolist())
        return np.stack([x, y], 1)

    crs = {} if system is None else {"crs": None} if system == "" else {"crs": {"properties": {"name": system}}}
    trees = [collection([feature(name, placed(ring)) for name, ring in stars(number)], **crs) for number in range(3)]
    dataset = opened(save(tmp_path, trees, geotiff=True))
    for name, labels in read_all(dataset).items():
        shapes = [(kind, to_world(ring)) for kind, ring in stars(int(name[-1]))]
        expected = rasterized(shapes, dataset.classes, rasterio.Affine(*PLACE))
        assert (labels != expected).mean() < 1e-3, "coordinates are rounded: a centre on an edge may be of the other side"
        assert len(np.unique(labels)) > 2


def squares(*properties: dict) -> list[dict]:
    return [collection([{**feature("", SQUARE), "properties": one} for one in properties])] * 3


@pytest.mark.parametrize(
    ("properties", "options", "classes", "number"),
    [
        ({"class": "road"}, {}, ["background", "road"], 1),
        ({"classification": {"name": "Tumor", "color": [1, 2, 3]}}, {}, ["background", "Tumor"], 1),  # QuPath's
        ({"kind": "road"}, {"property": "kind"}, ["background", "road"], 1),
        ({"class": "road"}, {"classes": ["road", "background"]}, ["road", "background"], 0),
        ({"class": "road"}, {"classes": ["water", "road"]}, ["background", "water", "road"], 2),
        ({"code": 7}, {"property": "code", "classes": {"water": 3, "road": 7}}, ["background", "water", "road"], 2),
        ({"code": 7.0}, {"property": "code"}, ["background", "7"], 1),
        ({"class": "road"}, {"outside": "ignore"}, ["road"], 0),
    ],
)
def test_a_property_says_the_class(tmp_path, properties, options, classes, number):
    dataset = opened(save(tmp_path, squares(properties), geotiff=False), **options)
    assert dataset.classes == classes
    for labels in read_all(dataset).values():
        assert (labels[10:30, 10:40] == number).all()
        outside = 255 if options.get("outside") == "ignore" else classes.index("background")
        assert labels.sum(dtype=int) == 600 * number + (SIZE[0] * SIZE[1] - 600) * outside


def test_later_polygons_are_over_earlier_ones(tmp_path):
    trees = squares({"class": "a"}, {"class": "b"})
    labels = read_all(opened(save(tmp_path / "one", trees, geotiff=False)))["scene0"]
    assert labels[20, 20] == 2
    trees[0]["features"].reverse()
    assert read_all(opened(save(tmp_path / "other", trees, geotiff=False)))["scene0"][20, 20] == 1


def test_a_file_that_changes_is_read_again(tmp_path):
    dataset = opened(save(tmp_path, squares({"class": "a"}), geotiff=False))
    path = tmp_path / "masks" / f"{Path(dataset.train.name_of(0)).stem}.geojson"
    assert dataset.train.read(0)[1].any()
    path.write_text(json.dumps(collection([])))
    assert not dataset.train.read(0)[1].any()


@pytest.mark.parametrize(
    ("trees", "options", "words"),
    [
        (
            squares({"class": "a"}, {}),
            {},
            r"feature 2 of .*scene0.geojson has no property class or .*; it has none: name the one",
        ),
        (squares({"class": "rod"}), {"classes": ["road"]}, r"feature 1 of .*geojson has the class 'rod'.*did you mean 'road'"),
        (squares({"class": "a"}), {"outside": "nothing"}, "data.options.outside is 'nothing'"),
        (squares({"class": "a"}), {"classes": {"a": 1, "b": 1}}, "has one class twice"),
        (squares({"class": "a"}), {"classes": "classes.txt"}, "of polygons give a list of names, or names with values"),
        (squares({"class": "a"}), {"ignore": 3}, "outside=ignore leaves out what is in none"),
        (
            [collection([feature("a", SQUARE + 500)])] * 3,
            {},
            "no polygon of .*geojson lies on .*png: the first is at columns 510",
        ),
        (["no tree"] * 3, {}, "scene0.geojson holds no features"),
        (
            [collection([feature("a", SQUARE / 100 + 8)])] * 3,
            {},
            "no polygon of .* is as large as a pixel of .*png.*longitudes",
        ),
        (
            [collection([feature("a", SQUARE)], crs={"properties": {"name": "EPSG:32632"}})] * 3,
            {},
            "feature 1 of .* is in the coordinate system EPSG:32632, and its image has no place in the world",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, trees, options, words):
    with pytest.raises(ValueError, match=words):
        opened(save(tmp_path, trees, geotiff=False), **options)


def test_metres_without_a_system_are_refused(tmp_path):
    trees = [collection([feature("a", to_world(SQUARE))])] * 3
    with pytest.raises(ValueError, match=r"feature 1 of .*geojson has the coordinates .* no longitude and latitude"):
        opened(save(tmp_path, trees, geotiff=True))


def test_polygons_in_other_formats_are_refused_with_the_command_that_converts_them(tmp_path):
    save(tmp_path, squares({"class": "a"}), geotiff=False, suffix=".gpkg")
    with pytest.raises(
        ValueError, match=r"is .gpkg, and polygons are read from GeoJSON and .*ogr2ogr scene0.geojson scene0.gpkg"
    ):
        opened(tmp_path)


def test_polygons_beside_masks_of_pixels_are_refused(tmp_path):
    save(tmp_path, squares({"class": "a"}), geotiff=False)
    (tmp_path / "masks" / "scene0.geojson").unlink()
    Image.fromarray(np.zeros(SIZE, dtype=np.uint8)).save(tmp_path / "masks" / "scene0.png")
    with pytest.raises(ValueError, match="is polygons and .*scene0.png is pixels"):
        opened(tmp_path)


def test_options_of_polygons_are_refused_for_pixels(tmp_path):
    save(tmp_path, squares({"class": "a"}), geotiff=False)
    for number in range(3):
        (tmp_path / "masks" / f"scene{number}.geojson").unlink()
        Image.fromarray(np.zeros(SIZE, dtype=np.uint8)).save(tmp_path / "masks" / f"scene{number}.png")
    with pytest.raises(ValueError, match="property and outside are for masks that are polygons"):
        opened(tmp_path, property="kind")
