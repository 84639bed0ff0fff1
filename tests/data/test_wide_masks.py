"""Masks and images of formats with windows: are they read by window, and are they what the same data in PNG is?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, mask_classes, open_dataset
from widefield.data.image import read_image
from widefield.geometry import Interval
from widefield.image_files import opened, opened_image

SIZE = (90, 70)
WINDOW = (Interval(20, 41), Interval(33, 60))
CUT = (slice(20, 41), slice(33, 60))


def pixels_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    image = random.integers(0, 4000, (3, *SIZE)).astype(np.uint16)
    return image, (image[0] // 1500).astype(np.uint8)


def as_tiff(path: Path, pixels: np.ndarray) -> None:
    tifffile = pytest.importorskip("tifffile")
    stored = np.moveaxis(pixels, 0, -1) if pixels.ndim == 3 else pixels
    photometric = "rgb" if pixels.ndim == 3 else "minisblack"
    tifffile.imwrite(path.with_suffix(".tif"), stored, tile=(16, 16), photometric=photometric, compression="zlib")


def as_geotiff(path: Path, pixels: np.ndarray) -> None:
    rasterio = pytest.importorskip("rasterio")
    planes = pixels if pixels.ndim == 3 else pixels[None]
    about = {"count": len(planes), "height": SIZE[0], "width": SIZE[1], "dtype": planes.dtype.name, "crs": "EPSG:32632"}
    kind = {"tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "deflate"}
    place = rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)
    with rasterio.open(path.with_suffix(".tif"), "w", driver="GTiff", transform=place, **about, **kind) as file:
        file.write(planes)
        if pixels.ndim == 2:
            file.write_colormap(1, {0: (0, 0, 0), 1: (255, 0, 0), 2: (0, 255, 0)})


def as_zarr(path: Path, pixels: np.ndarray) -> None:
    zarr = pytest.importorskip("zarr")
    names = ["c", "y", "x"][-pixels.ndim :]
    array = zarr.create_array(
        str(path) + ".zarr",
        shape=pixels.shape,
        chunks=(1, 16, 16)[-pixels.ndim :],
        dtype=pixels.dtype.name,
        dimension_names=names,
    )
    array[:] = pixels


def as_hdf5(path: Path, pixels: np.ndarray) -> None:
    with pytest.importorskip("h5py").File(path.with_suffix(".h5"), "w") as file:
        file.create_dataset("image", data=pixels, chunks=(1, 16, 16)[-pixels.ndim :])


WRITERS = {"tiff": as_tiff, "geotiff": as_geotiff, "zarr": as_zarr, "hdf5": as_hdf5}


@pytest.fixture(params=WRITERS)
def dataset(request, tmp_path) -> Dataset:
    for number in range(4):
        image, mask = pixels_of(number)
        for name, pixels in (("images", image), ("masks", mask)):
            (tmp_path / name).mkdir(exist_ok=True)
            WRITERS[request.param](tmp_path / name / f"scene{number}", pixels)
    return open_dataset(DataConfig(name="masks", path=str(tmp_path), hold_out=0.25))


def number_of(dataset: Dataset, index: int) -> int:
    return int(Path(dataset.train.name_of(index)).name.split(".")[0][-1])


def test_images_and_masks_are_what_was_written(dataset):
    assert (dataset.channels, dataset.dtype, len(dataset.train), len(dataset.classes)) == (3, torch.uint16, 3, 3)
    for index in range(3):
        image, mask = pixels_of(number_of(dataset, index))
        found, labels = dataset.train.read(index)
        assert np.array_equal(found.numpy(), image) and np.array_equal(labels.numpy(), mask)


def test_a_window_is_that_part_and_no_more_blocks_are_decoded_than_it_touches(dataset):
    assert isinstance(dataset.train, WindowedImages)
    image, mask = pixels_of(number_of(dataset, 0))
    path = Path(dataset.train.name_of(0))
    files = [opened_image(path), opened_image(path.parent.parent / "masks" / path.name)]
    before = [file.bytes_decoded for file in files]
    found, labels = dataset.train.read_window(0, WINDOW)
    assert np.array_equal(found.numpy(), image[:, *CUT]) and np.array_equal(labels.numpy(), mask[CUT])
    decoded = [file.bytes_decoded - start for file, start in zip(files, before, strict=True)]
    touched = 2 * 16 * 2 * 16  # rows 16 to 47, columns 32 to 63
    assert decoded[0] <= touched * 3 * 2 and decoded[1] <= touched
    assert dataset.train.shape(0) == (3, *SIZE)


def test_numbers_of_masks_are_found_in_bands(dataset, monkeypatch):
    files = [dataset.train.records[index].target.file for index in range(3)]
    asked = []
    whole = mask_classes.raw_mask
    wanted = {number for file in files for number in np.unique(whole(file)).tolist()}
    monkeypatch.setattr(mask_classes, "BAND", 32)
    monkeypatch.setattr(mask_classes, "raw_mask", lambda file, window: asked.append(window) or whole(file, window=window))
    assert mask_classes.numbers_in(files) == wanted == {0, 1, 2}
    assert len(asked) == 9 and all(len(rows) <= 32 for rows, _ in asked)


def test_a_png_beside_them_is_the_same(tmp_path):
    """One image in two formats: the pixels that a network gets do not depend on it."""
    image = np.random.default_rng(0).integers(0, 256, (3, *SIZE)).astype(np.uint8)
    Image.fromarray(np.moveaxis(image, 0, -1)).save(tmp_path / "a.png")
    as_geotiff(tmp_path / "a", image)
    assert torch.equal(read_image(tmp_path / "a.png"), read_image(tmp_path / "a.tif"))
    assert torch.equal(read_image(tmp_path / "a.png", window=WINDOW), read_image(tmp_path / "a.tif", window=WINDOW))


def test_files_stay_open_but_not_for_ever(dataset):
    for index in range(3):
        dataset.train.read(index)
    assert 0 < len(opened._open) <= opened.MOST_OPEN
