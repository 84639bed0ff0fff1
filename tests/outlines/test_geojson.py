"""GeoJSON of outlines: valid by RFC 7946, in the place of the image, as rasterio reads it; damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from widefield.geometry.box import slices
from widefield.image_files.info import ImageInfo, one_level
from widefield.outlines.geojson import Legend, read_geojson, rings_in, write_outlines
from widefield.outlines.place import LONGITUDE_LATITUDE, Georeference, name_of, place_of, transformed
from widefield.outlines.tracing import traced

LEGEND = Legend(("water", "forest", "road"), ((0, 0, 255), (0, 128, 0), (90, 90, 90)))
MATRIX = np.array([[0.3, 0.05, 500_000.1], [0.02, -0.3, 4_600_000.7], [0, 0, 1]])


@pytest.fixture
def labels() -> np.ndarray:
    return np.kron(np.random.default_rng(0).integers(0, 3, (8, 9)), np.ones((4, 3), int)).astype(np.uint8)


def written(labels: np.ndarray, path: Path, place: Georeference | None = None) -> dict:
    write_outlines(path, traced(lambda box: labels[slices(box)], labels.shape, keep=lambda one: one < 3), LEGEND, place)
    return json.loads(path.read_text())


def test_without_a_place_coordinates_are_pixels_as_in_qupath(labels, tmp_path):
    tree = written(labels, tmp_path / "a.geojson")
    assert tree["type"] == "FeatureCollection" and "crs" not in tree
    for feature in tree["features"]:
        about, colour = feature["properties"], LEGEND.colours[feature["properties"]["number"]]
        assert about["class"] == LEGEND.names[about["number"]] and about["objectType"] == "annotation"
        assert about["classification"] == {"name": about["class"], "color": list(colour)}
        for ring in feature["geometry"]["coordinates"]:
            assert ring[0] == ring[-1] and all(type(one) is int for point in ring for one in point)


def area(ring: list[list[float]]) -> float:
    points = np.array(ring) - ring[0]
    return float((points[:-1, 0] * points[1:, 1] - points[1:, 0] * points[:-1, 1]).sum())


@pytest.mark.parametrize(
    "place", [None, Georeference(MATRIX), Georeference(np.diag([2.0, 3.0, 1.0]))], ids=["pixels", "north up", "south up"]
)
def test_outer_rings_are_counterclockwise_and_holes_clockwise(labels, tmp_path, place):
    """RFC 7946, 3.1.6."""
    labels[10:14, 10:14], labels[11:13, 11:13] = 1, 2
    for feature in written(labels, tmp_path / "a.geojson", place)["features"]:
        outer, *holes = feature["geometry"]["coordinates"]
        assert area(outer) > 0 and all(area(hole) < 0 for hole in holes)


def test_a_place_without_a_system_says_so(labels, tmp_path):
    assert written(labels, tmp_path / "a.geojson", Georeference(MATRIX))["crs"] is None
    assert read_geojson(tmp_path / "a.geojson").system == ""


@pytest.mark.parametrize("code", ["EPSG:32632", "EPSG:4326", "+proj=laea +lat_0=47.3 +lon_0=8.1 +datum=WGS84"])
def test_rasterizing_by_rasterio_gives_the_labels_back(labels, tmp_path, code):
    rasterio = pytest.importorskip("rasterio")
    from rasterio.features import rasterize

    world = rasterio.crs.CRS.from_user_input(code).to_wkt()
    tree = written(labels, tmp_path / "a.geojson", Georeference(MATRIX, world))
    shapes = [(feature["geometry"], feature["properties"]["number"]) for feature in tree["features"]]
    found = rasterize(shapes, labels.shape, fill=9, transform=rasterio.Affine(*MATRIX[:2].ravel()), dtype="uint8")
    assert np.array_equal(found, labels)
    system = read_geojson(tmp_path / "a.geojson").system
    assert system == {"EPSG:32632": "urn:ogc:def:crs:EPSG::32632", "EPSG:4326": LONGITUDE_LATITUDE}.get(code, world)
    point = np.array([[8.0, 47.0]])
    assert np.allclose(transformed(point, system, world), point, rtol=1e-12)


def test_the_place_of_an_image_is_that_of_corners():
    affine = ((0.05, 0.3, 100.0), (-0.3, 0.02, 200.0), (0.0, 0.0, 1.0))
    info = ImageInfo("GeoTIFF", "reader", "YX", 1, "uint8", one_level((4, 5)), affine=affine)
    place = place_of(info)
    assert np.allclose(place.to_world(np.array([[0.5, 0.5]])), [[100.0, 200.0]], rtol=1e-14)
    points = np.random.default_rng(0).uniform(0, 9, (5, 2))
    assert np.allclose(place.to_pixels(place.to_world(points)), points, atol=1e-11)  # of 200 in float64
    assert place_of(ImageInfo("TIFF", "reader", "YX", 1, "uint8", one_level((4, 5)))) is None


def test_what_is_written_is_read(labels, tmp_path):
    written(labels, tmp_path / "a.geojson", Georeference(MATRIX))
    regions = list(traced(lambda box: labels[slices(box)], labels.shape, keep=lambda one: one < 3))
    found = list(rings_in(read_geojson(tmp_path / "a.geojson")))
    assert len(found) == len(regions)
    for region, (feature, rings) in zip(regions, found, strict=True):
        assert feature.properties["number"] == region.number and len(rings) == len(region.rings)
        assert np.array_equal(rings[0][:-1][::-1], Georeference(MATRIX).to_world(region.rings[0].astype(float)))


SQUARE = [[0, 0], [1, 0], [1, 1], [0, 0]]


def feature(**geometry) -> dict:
    return {"type": "Feature", "properties": {}, "geometry": geometry or None}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("{", "is no GeoJSON"),
        ({"type": "Topology"}, "holds no features of GeoJSON"),
        ([1], "holds no features"),
        ([feature(type="Polygon", coordinates=[SQUARE]), feature(type="Point", coordinates=[1, 2])], "feature 2 of .* a Point"),
        (feature(), "feature 1 of .* without a geometry"),
        (
            feature(type="Polygon", coordinates=[SQUARE[:3]]),
            "feature 1 of .* at least four points of two numbers, and this has 3",
        ),
        (feature(type="Polygon", coordinates=[[["a", 0]] * 4]), "coordinates of feature 1 of .* are damaged"),
        (feature(type="Polygon", coordinates=[]), "a polygon without points"),
        ({"type": "FeatureCollection", "features": [], "crs": 4326}, "the crs of .* is 4326, and not a name"),
    ],
)
def test_what_is_no_polygon_is_refused_with_file_and_feature(tmp_path, tree, words):
    path = tmp_path / "drawn.geojson"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    with pytest.raises(ValueError, match=words) as found:
        read_geojson(path)
    assert str(path) in str(found.value)


def test_a_system_that_nobody_knows_is_refused():
    rasterio = pytest.importorskip("rasterio")
    world = rasterio.crs.CRS.from_epsg(32632).to_wkt()
    assert name_of(world) == "urn:ogc:def:crs:EPSG::32632"
    with pytest.raises(ValueError, match="coordinate system NOWHERE is not known"):
        transformed(np.zeros((1, 2)), "NOWHERE", world)
