"""Are written labels those that were read, with their smaller levels, and is no more of them in memory than some blocks?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from widefield.geometry.box import Box, size_of, slices
from widefield.image_files import open_image
from widefield.image_files.band_image import BandImage
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.label_image import LabelImage, halved, read_smaller
from widefield.naming import load

ANYWHERE = ["numpy_array", "tiff", "zarr_array"]
"""Others want a file of their format to lie on: GeoTIFF's are in tests/prediction."""
SIZE = (1300, 1111)


def labels_of(dtype: str = "uint8", size: tuple[int, ...] = SIZE) -> tuple[LabelImage, np.ndarray]:
    blocks = np.random.default_rng(0).integers(0, 300 if dtype == "uint16" else 5, [-(-extent // 7) for extent in size])
    pixels = np.kron(blocks, np.ones((7, 7), int))[: size[0], : size[1]].astype(dtype)
    info = ImageInfo("TIFF", "reader", "YX", 3, "uint8", one_level(size), spacing=(0.5, 0.25), unit="um")
    classes = tuple(f"class {number}" for number in range(300 if dtype == "uint16" else 5))
    colours = tuple((number % 256, 20, 255 - number % 256) for number in range(len(classes)))
    return LabelImage(Path("image.tif"), info, dtype, classes, colours, nodata=255, notes={"made": "by a test"}), pixels


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("name", ANYWHERE)
def test_labels_come_back_at_every_level(tmp_path, name, dtype):
    labels, pixels = labels_of(dtype)
    module, read = load("widefield.image_files.label_files", name), []

    def part(box: Box) -> np.ndarray:
        read.append(max(size_of(box)))
        return pixels[slices(box)]

    path = tmp_path / f"labels{module.LABEL_SUFFIX}"
    module.write_labels(path, labels, part)
    with open_image(path) as image:
        assert image.info.dtype == dtype and image.info.size == SIZE
        expected = pixels
        for level in range(len(image.info.levels)):
            assert np.array_equal(image.read(level=level)[0], expected)
            expected = halved(expected)
        if name != "numpy_array":
            assert len(image.info.levels) > 1 and image.info.spacing == pytest.approx((0.5, 0.25)) and image.info.unit == "um"
    assert max(read) <= 1024


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_smaller_level_is_made_from_pieces_as_from_the_whole(step):
    labels, pixels = labels_of(size=(301, 250))
    whole = pixels
    for _ in range(step):
        whole = halved(whole)
    assert whole.shape == labels.size_at(step)
    for box in labels.blocks(64, step):
        assert np.array_equal(read_smaller(lambda part: pixels[slices(part)], labels, box, step), whole[slices(box)])


def test_half_of_labels_is_their_mode_and_thin_things_stay():
    random = np.random.default_rng(1).integers(0, 4, (64, 62)).astype(np.uint8)
    found = halved(random)
    for row, column in np.ndindex(found.shape):
        counts = np.bincount(random[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].ravel())
        assert found[row, column] == max(np.flatnonzero(counts == counts.max()))


# ---------------------------------------------------------------------------------------------- NIfTI

AFFINE = np.array([[0, -0.7, 0.1, 12.5], [0.8, 0, 0, -3.25], [0, 0.1, 2.5, 7.75], [0, 0, 0, 1]])


def nifti_pair(place: Path, kind: str) -> tuple[Path, Path, np.ndarray]:
    """An image, its labels, and what they are: (Z, Y, X)."""
    nibabel = pytest.importorskip("nibabel")
    pixels = np.random.default_rng(0).integers(0, 5, (7, 13, 11)).astype(np.uint8)
    image = getattr(nibabel, kind)(np.zeros(pixels.T.shape, dtype=np.int16), AFFINE)
    image.header.set_xyzt_units("mm", "sec")
    image.header.set_slope_inter(2.0, 1.0)
    path = place / "image.nii"
    nibabel.save(image, path)
    with open_image(path) as opened:
        labels = LabelImage(path, opened.info, "uint8", ("a", "b", "c", "d", "e"), ((0, 0, 0),) * 5)
    target = place / "labels.nii.gz"
    load("widefield.image_files.label_files", "nifti").write_labels(target, labels, lambda box: pixels[slices(box)])
    return path, target, pixels


@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
def test_labels_of_a_volume_lie_on_it_as_nibabel_reads_both(tmp_path, kind):
    nibabel = pytest.importorskip("nibabel")
    path, target, pixels = nifti_pair(tmp_path, kind)
    image, labels = nibabel.load(path), nibabel.load(target)
    assert type(labels) is type(image) and np.array_equal(image.affine, labels.affine)
    assert labels.header.get_zooms() == image.header.get_zooms() and labels.header.get_xyzt_units() == ("mm", "sec")
    for key in ("sform_code", "qform_code", "pixdim", "quatern_b", "qoffset_x"):
        assert np.array_equal(labels.header[key], image.header[key]), key
    assert labels.get_data_dtype() == np.uint8 and np.array_equal(np.asarray(labels.dataobj), pixels.T)
    with open_image(target) as opened:
        assert np.array_equal(opened.read()[0], pixels)


def test_the_same_labels_are_the_same_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    files = [nifti_pair(tmp_path / name, "Nifti1Image")[1].read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize("size", [(6, 16, 12), (3, 700, 600)])
def test_labels_and_probabilities_of_a_volume_are_written_as_ome_tiff_with_its_spacing(tmp_path, size):
    module, random = load("widefield.image_files.label_files", "tiff"), np.random.default_rng(0)
    pixels, likely = random.integers(0, 3, size).astype(np.uint8), random.random((3, *size)).astype(np.float32)
    info = ImageInfo("OME-TIFF", "reader", "ZYX", 1, "uint8", one_level(size), spacing=(2.0, 0.5, 0.25), unit="um")
    classes, colours = ("a", "b", "c"), ((0, 0, 0), (1, 1, 1), (2, 2, 2))
    labels = LabelImage(Path("scan.ome.tif"), info, "uint8", classes, colours, notes={"made": "by a test"})
    bands = BandImage(Path("scan.ome.tif"), info, "float32", classes, nodata=np.nan, scale=1.0, notes={})
    module.write_labels(tmp_path / "labels.tif", labels, lambda box: pixels[slices(box)])
    module.write_bands(tmp_path / "likely.tif", bands, lambda number, box: likely[number][slices(box)])
    for name, expected in (("labels.tif", pixels[None]), ("likely.tif", likely)):
        with open_image(tmp_path / name) as image:
            assert image.info.format == "OME-TIFF" and image.info.spacing == pytest.approx((2.0, 0.5, 0.25))
            assert np.array_equal(image.read(), expected)
    with open_image(tmp_path / "labels.tif") as image:
        assert len(image.info.levels) == 1 + (size[1] > 512)
        assert np.array_equal(image.read(level=len(image.info.levels) - 1)[0], pixels if size[1] < 512 else halved(pixels))
