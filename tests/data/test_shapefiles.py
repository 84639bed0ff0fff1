"""Masks in shapefiles: the labels of the same polygons in GeoJSON, in the system of the .prj; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from polygon_masks import PLACE, SIZE, SQUARE, collection, feature, opened, rasterized, read_all, save, stars, to_world

shapefile = pytest.importorskip("shapefile")


def save_shapefiles(root: Path, shapes: list[list[tuple[str, np.ndarray]]], *, system: str = "", geotiff: bool = False) -> Path:
    """An image for each list of classes and rings."""
    save(root, [collection([])] * len(shapes), geotiff=geotiff)
    for number, polygons in enumerate(shapes):
        (root / "masks" / f"scene{number}.geojson").unlink()
        write(root / "masks" / f"scene{number}.shp", polygons, system)
    return root


def write(path: Path, polygons: list[tuple[str, np.ndarray]], system: str = "", encoding: str = "utf-8") -> None:
    with shapefile.Writer(str(path), shapeType=shapefile.POLYGON, encoding=encoding) as file:
        file.field("class", "C")
        for name, ring in polygons:
            points = ring if _is_clockwise(ring) else ring[::-1]  # of a shapefile, counterclockwise rings are holes
            file.poly([[*points.tolist(), points[0].tolist()]])
            file.record(name)
    if system:
        rasterio = pytest.importorskip("rasterio")
        path.with_suffix(".prj").write_text(rasterio.crs.CRS.from_user_input(system).to_wkt(version="WKT1_ESRI"))


def _is_clockwise(ring: np.ndarray) -> bool:
    (x, y), (after_x, after_y) = ring.T, np.roll(ring, -1, axis=0).T
    return float((x * after_y - after_x * y).sum()) < 0


def test_polygons_in_pixels_are_what_rasterio_makes(tmp_path):
    dataset = opened(save_shapefiles(tmp_path, [stars(number) for number in range(3)]))
    assert dataset.classes == ["background", "forest", "road", "water"]
    for name, labels in read_all(dataset).items():
        assert np.array_equal(labels, rasterized(stars(int(name[-1])), dataset.classes))


@pytest.mark.parametrize("system", ["EPSG:32632", "EPSG:3857", "EPSG:4326"])
def test_coordinates_are_taken_from_the_system_of_the_prj(tmp_path, system):
    warp = pytest.importorskip("rasterio.warp")
    import rasterio

    def placed(ring: np.ndarray) -> np.ndarray:
        return np.stack(warp.transform("EPSG:32632", system, *to_world(ring).T.tolist()), 1)

    shapes = [[(name, placed(ring)) for name, ring in stars(number)] for number in range(3)]
    dataset = opened(save_shapefiles(tmp_path, shapes, system=system, geotiff=True))
    for name, labels in read_all(dataset).items():
        expected = [(kind, to_world(ring)) for kind, ring in stars(int(name[-1]))]
        assert (labels != rasterized(expected, dataset.classes, rasterio.Affine(*PLACE))).mean() < 1e-3
        assert len(np.unique(labels)) > 2


def test_holes_and_several_parts_are_one_shape(tmp_path):
    save_shapefiles(tmp_path, [[]] * 3)
    outer, hole, other = SQUARE, SQUARE / 2 + 10, SQUARE / 2 + 45
    wanted = zip((outer, hole, other), (True, False, True), strict=True)
    rings = [ring if is_clockwise == _is_clockwise(ring) else ring[::-1] for ring, is_clockwise in wanted]
    for number in range(3):
        with shapefile.Writer(str(tmp_path / "masks" / f"scene{number}.shp"), shapeType=shapefile.POLYGON) as file:
            file.field("class", "C")
            file.poly([[*ring.tolist(), ring[0].tolist()] for ring in rings])
            file.record("road")
    expected = np.zeros(SIZE, np.uint8)
    expected[10:30, 10:40] = 1
    expected[15:25, 15:30] = 0
    expected[50:60, 50:65] = 1
    assert np.array_equal(read_all(opened(tmp_path))["scene0"], expected)


def test_texts_have_the_encoding_of_the_cpg(tmp_path):
    save_shapefiles(tmp_path, [[]] * 3)
    for number in range(3):
        write(tmp_path / "masks" / f"scene{number}.shp", [("Gehölz", SQUARE)], encoding="latin-1")
    with pytest.raises(ValueError, match=r"the texts of .*scene0.dbf are not utf-8; .*scene0.cpg, as ISO-8859-1"):
        opened(tmp_path)
    for number in range(3):
        (tmp_path / "masks" / f"scene{number}.cpg").write_text("ISO-8859-1\n")
    assert opened(tmp_path).classes == ["background", "Gehölz"]


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    world = [[("a", to_world(SQUARE))]] * 3
    with pytest.raises(ValueError, match=r"scene0.shp does not say its coordinate system, .* as scene0.prj, or export"):
        opened(save_shapefiles(tmp_path / "system", world, geotiff=True))
    with pytest.raises(ValueError, match=r"feature 1 of .*shp is in the coordinate system .*, and its image has no place"):
        opened(save_shapefiles(tmp_path / "placed", world, system="EPSG:32632"))
    folder = save_shapefiles(tmp_path / "parts", [[("a", SQUARE)]] * 3)
    (folder / "masks" / "scene0.prj").write_text("nonsense")
    with pytest.raises(ValueError, match=r"scene0.prj is no coordinate system"):
        opened(folder)
    (folder / "masks" / "scene0.prj").unlink()
    path = folder / "masks" / "scene0.shp"
    content = path.read_bytes()
    for damaged in (content[:50], content[:-20], b"\0" * 200):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"scene0.shp"):
            opened(folder)
    path.write_bytes(content)
    (folder / "masks" / "scene0.dbf").unlink()
    with pytest.raises(ValueError, match=r"scene0.shp lacks scene0.dbf beside it; copy all files"):
        opened(folder)
    monkeypatch.setitem(__import__("sys").modules, "shapefile", None)
    with pytest.raises(ValueError, match=r"is a shapefile, which pyshp reads; pip install 'widefield\[shapefile\]'"):
        opened(save(tmp_path / "missing", [collection([feature("a", SQUARE)])] * 3, geotiff=False, suffix=".shp"))


def test_points_and_lines_are_refused(tmp_path):
    save_shapefiles(tmp_path, [[]] * 3)
    with shapefile.Writer(str(tmp_path / "masks" / "scene0.shp"), shapeType=shapefile.POINT) as file:
        file.field("class", "C")
        file.point(3, 4)
        file.record("a")
    with pytest.raises(ValueError, match=r"feature 1 of .*scene0.shp is a Point, and labels are made of polygons"):
        opened(tmp_path)
