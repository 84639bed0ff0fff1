"""Are written labels those that were read, with their smaller levels, and is no more of them in memory than some blocks?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from widefield.geometry.box import Box, size_of, slices
from widefield.image_files import open_image
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.label_image import LabelImage, halved, read_smaller
from widefield.naming import load, names_in

FORMATS = [name for name in names_in("widefield.image_files.label_files") if name != "geotiff"]  # see test_geotiff_labels
SIZE = (1300, 1111)


def labels_of(dtype: str = "uint8", size: tuple[int, ...] = SIZE) -> tuple[LabelImage, np.ndarray]:
    blocks = np.random.default_rng(0).integers(0, 300 if dtype == "uint16" else 5, [-(-extent // 7) for extent in size])
    pixels = np.kron(blocks, np.ones((7, 7), int))[: size[0], : size[1]].astype(dtype)
    info = ImageInfo("TIFF", "reader", "YX", 3, "uint8", one_level(size), spacing=(0.5, 0.25), unit="um")
    classes = tuple(f"class {number}" for number in range(300 if dtype == "uint16" else 5))
    colours = tuple((number % 256, 20, 255 - number % 256) for number in range(len(classes)))
    return LabelImage(Path("image.tif"), info, dtype, classes, colours, nodata=255, notes={"made": "by a test"}), pixels


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("name", FORMATS)
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
