"""A GeoTIFF is predicted by window into one that lies on it: place, classes, nodata, levels; equal to the whole result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from wide_scene import as_geotiff, as_zarr, labels_in, predicted

from widefield.image_files import open_image

pytestmark = pytest.mark.usefixtures("always_wide")
rasterio = pytest.importorskip("rasterio")


@pytest.mark.long
def test_labels_lie_where_the_scene_lies(run, scene, whole, tmp_path):
    path = as_geotiff(np.load(scene), tmp_path / "scene.tif")
    found = predicted(run, path, tmp_path / "out")
    assert found.answers[0].labels == str(tmp_path / "out" / "scene.tif")
    assert np.array_equal(labels_in(found), whole)
    with rasterio.open(path) as image, rasterio.open(found.answers[0].labels) as labels:
        assert (labels.crs, labels.transform, labels.shape) == (image.crs, image.transform, image.shape)
        assert labels.dtypes == ("uint8",) and labels.nodata is None and labels.compression.name == "deflate"
        assert labels.colormap(1)[1][:3] == (86, 146, 214) and labels.tags()["CLASSES"].startswith('["background", "0"')
        assert "nothing blended" in labels.tags()["made"]


def test_pixels_of_nodata_have_no_label_and_do_not_count(run, scene, whole, tmp_path):
    pixels = np.load(scene).copy()
    pixels[:, :40, :90] = 0
    pixels[:, 40:] = np.maximum(pixels[:, 40:], 1)
    pixels[:, :, 90:] = np.maximum(pixels[:, :, 90:], 1)
    path = as_geotiff(pixels, tmp_path / "scene.tif", nodata=0)
    found = predicted(run, path, tmp_path / "out", top=11)
    labels = labels_in(found)
    assert (labels[:40, :90] == 255).all() and not (labels[40:] == 255).any() and not (labels[:, 90:] == 255).any()
    np.save(tmp_path / "plain.npy", pixels)
    plain = labels_in(predicted(run, tmp_path / "plain.npy", tmp_path / "plain"))
    assert np.array_equal(labels[40:], plain[40:])
    answer = found.answers[0]
    assert answer.left_out == 40 * 90 and sum(answer.probabilities) == pytest.approx(1)
    with rasterio.open(answer.labels) as file:
        assert file.nodata == 255


@pytest.mark.parametrize("format", ["zarr", "tif"])
def test_other_formats_have_labels_of_their_own(run, scene, whole, tmp_path, format):
    pixels, path = np.load(scene), tmp_path / f"scene.{format}"
    if format == "zarr":
        as_zarr(pixels, path)
    else:
        pytest.importorskip("tifffile").imwrite(path, pixels[0], tile=(64, 64), compression="zlib")
    found = predicted(run, path, tmp_path / "out")
    assert Path(found.answers[0].labels).suffix == path.suffix and np.array_equal(labels_in(found), whole)
    with open_image(found.answers[0].labels) as image:
        assert image.info.size == whole.shape
