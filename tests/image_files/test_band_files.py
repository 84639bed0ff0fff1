"""Are written bands those that were read, with their smaller levels, names and places?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from widefield.geometry.box import Box, size_of, slices
from widefield.image_files import open_image
from widefield.image_files.band_image import BandImage, averaged
from widefield.image_files.info import ImageInfo, one_level
from widefield.naming import load

SIZE, NAMES = (1300, 1111), ("a", "b", "c", "d", "e")


def bands_of(dtype: str, size: tuple[int, ...] = SIZE, axes: str = "YX") -> tuple[BandImage, np.ndarray]:
    pixels = np.random.default_rng(0).random((len(NAMES), *size))
    scale, nodata = (1.0, np.nan) if dtype == "float32" else (1 / 65534, 65535)
    stored = (pixels if dtype == "float32" else np.rint(pixels * 65534)).astype(dtype)
    stored[:, ..., :10, :30] = nodata
    info = ImageInfo("TIFF", "reader", axes, 3, "uint8", one_level(size), spacing=(0.5, 0.25)[-2:], unit="um")
    return BandImage(Path("image.tif"), info, dtype, NAMES, nodata, scale, notes={"made": "by a test"}), stored


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("name", ["numpy_array", "tiff", "zarr_array"])
def test_bands_come_back_at_every_level(tmp_path, name, dtype):
    (bands, pixels), read = bands_of(dtype), []
    module = load("widefield.image_files.label_files", name)

    def part(band: int, box: Box) -> np.ndarray:
        read.append(max(size_of(box)))
        return pixels[band][slices(box)]

    path = tmp_path / f"likely{module.BAND_SUFFIX}"
    module.write_bands(path, bands, part)
    assert max(read) <= 1024
    if name == "numpy_array":
        assert np.array_equal(np.load(path), pixels, equal_nan=dtype == "float32")
        return
    with open_image(path) as image:
        assert (image.info.channels, image.info.dtype, image.info.size) == (5, dtype, SIZE)
        assert len(image.info.levels) > 1 and image.info.spacing == pytest.approx((0.5, 0.25)) and image.info.unit == "um"
        expected = pixels
        for level in range(len(image.info.levels)):
            assert np.array_equal(image.read(level=level), expected, equal_nan=dtype == "float32")
            expected = averaged(expected, nodata=bands.nodata)
        if name == "zarr_array":
            assert image.info.channel_names == NAMES


def test_half_of_bands_is_the_mean_of_what_is_there():
    nan = np.nan
    values = np.array([[1, 3, nan], [5, nan, nan], [2, 4, 8]], np.float32)
    assert np.array_equal(averaged(values, nodata=nan), [[3, nan], [3, 8]], equal_nan=True)
    numbers = np.array([[1, 3, 9], [5, 9, 9], [2, 4, 8]], np.uint16)
    assert averaged(numbers, nodata=9).tolist() == [[3, 9], [3, 8]]


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_a_volume_of_bands_lies_on_its_image_as_nibabel_reads_both(tmp_path, dtype):
    nibabel = pytest.importorskip("nibabel")
    affine = np.array([[0, -0.7, 0.1, 12.5], [0.8, 0, 0, -3.25], [0, 0.1, 2.5, 7.75], [0, 0, 0, 1]])
    bands, pixels = bands_of(dtype, (7, 13, 31), "ZYX")
    nibabel.save(nibabel.Nifti1Image(np.zeros((31, 13, 7), dtype=np.int16), affine), tmp_path / "image.nii")
    with open_image(tmp_path / "image.nii") as opened:
        bands = BandImage(tmp_path / "image.nii", opened.info, dtype, NAMES, bands.nodata, bands.scale)
    module = load("widefield.image_files.label_files", "nifti")
    module.write_bands(tmp_path / "likely.nii", bands, lambda band, box: pixels[band][slices(box)])
    likely = nibabel.load(tmp_path / "likely.nii")
    assert likely.shape == (31, 13, 7, 5) and np.array_equal(likely.affine, nibabel.load(tmp_path / "image.nii").affine)
    assert likely.header.get_zooms()[:3] == nibabel.load(tmp_path / "image.nii").header.get_zooms()
    found = np.asarray(likely.dataobj).T
    np.testing.assert_allclose(found, pixels * bands.scale, rtol=1e-6)  # nibabel scales in float64, the slope is float32
    with open_image(tmp_path / "likely.nii") as image:
        assert image.info.by_window and image.info.channels == 5
