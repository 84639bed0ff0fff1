"""Are pixels of every dtype read as they are, windows of .npy files alone, and files of several dtypes as one?"""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset, open_dataset
from widefield.data.image import read_image, shape_and_dtype_of, size_of
from widefield.geometry import Interval

RANDOM = np.random.default_rng(0)
GREY16 = RANDOM.integers(0, 65536, (6, 9), dtype=np.uint16)
RGB16 = RANDOM.integers(0, 65536, (6, 9, 3), dtype=np.uint16)
FIVE = RANDOM.integers(0, 65536, (6, 9, 5), dtype=np.uint16)
PAGES = RANDOM.integers(0, 65536, (4, 6, 9), dtype=np.uint16)
FLOATS = RANDOM.normal(0, 1000, (6, 9)).astype(np.float32)
WINDOW = (Interval(2, 5), Interval(1, 8))

TIFFS = {
    "grey, 16 bits": (GREY16, {}, GREY16[None]),
    "grey, 16 bits, big-endian": (GREY16, {"byteorder": ">"}, GREY16[None]),
    "grey, signed 16 bits": (GREY16.astype(np.int16), {}, GREY16.astype(np.int16)[None]),
    "grey, signed 16 bits, big-endian": (GREY16.astype(np.int16), {"byteorder": ">"}, GREY16.astype(np.int16)[None]),
    "RGB, 16 bits": (RGB16, {"photometric": "rgb"}, RGB16.transpose(2, 0, 1)),
    "RGB, 16 bits, big-endian": (RGB16, {"photometric": "rgb", "byteorder": ">"}, RGB16.transpose(2, 0, 1)),
    "RGB, 16 bits, planes": (
        RGB16.transpose(2, 0, 1), {"photometric": "rgb", "planarconfig": "separate"}, RGB16.transpose(2, 0, 1),
    ),
    "RGB, 16 bits, tiles": (RGB16, {"photometric": "rgb", "tile": (16, 16)}, RGB16.transpose(2, 0, 1)),
    "RGB, 8 bits": ((RGB16 >> 8).astype(np.uint8), {"photometric": "rgb"}, (RGB16 >> 8).astype(np.uint8).transpose(2, 0, 1)),
    "RGB, floats": (RGB16.astype(np.float32), {"photometric": "rgb"}, RGB16.astype(np.float32).transpose(2, 0, 1)),
    "five channels": (FIVE, {"photometric": "minisblack", "planarconfig": "contig"}, FIVE.transpose(2, 0, 1)),
    "four pages": (PAGES, {"photometric": "minisblack"}, PAGES),
    "four pages, big-endian": (PAGES, {"photometric": "minisblack", "byteorder": ">"}, PAGES),
    "four pages of floats": (PAGES.astype(np.float32), {"photometric": "minisblack"}, PAGES.astype(np.float32)),
    "floats": (FLOATS, {}, FLOATS[None]),
    "floats, big-endian": (FLOATS, {"byteorder": ">"}, FLOATS[None]),
    "doubles": (FLOATS.astype(np.float64), {}, FLOATS[None].astype(np.float64)),
    "half floats": (FLOATS.astype(np.float16), {}, FLOATS[None].astype(np.float16)),
}  # fmt: skip


@pytest.mark.parametrize("name", TIFFS)
def test_a_tiff_has_its_own_pixels(tmp_path, name):
    stored, options, wanted = TIFFS[name]
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stored, **options)
    found = read_image(path)
    assert found.numpy().dtype == wanted.dtype and np.array_equal(found.numpy(), wanted)
    assert np.array_equal(read_image(path, window=WINDOW).numpy(), wanted[:, 2:5, 1:8])
    assert shape_and_dtype_of(path) == (wanted.shape, found.dtype) and size_of(path) == wanted.shape[1:]


def test_without_tifffile_it_is_said_what_to_install(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", RGB16, photometric="rgb")
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    with pytest.raises(
        BadImageError, match=r"16 bits per channel in RGB, of which Pillow reads 8; pip install 'widefield\[tiff\]'"
    ):
        read_image(tmp_path / "a.tif")


def test_pixels_of_a_tiff_that_are_no_numbers_for_a_network_are_refused(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((2, 3, 4, 6, 9), dtype=np.uint16), photometric="minisblack")
    with pytest.raises(BadImageError, match="channels that are not named"):
        read_image(tmp_path / "a.tif")


# ---------------------------------------------------------------------------------------------- .npy


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "<i2", ">i2", "<f4", ">f4", "f8", "bool"])
@pytest.mark.parametrize("last", [False, True])
def test_an_npy_file_has_its_own_pixels(tmp_path, dtype, last):
    stored = (FIVE.transpose(2, 0, 1) % 200).astype(dtype)
    np.save(tmp_path / "a.npy", stored.transpose(1, 2, 0) if last else stored)
    wanted = stored.astype(np.uint8 if dtype == "bool" else stored.dtype.newbyteorder("="))
    found = read_image(tmp_path / "a.npy")
    assert found.numpy().dtype == wanted.dtype and np.array_equal(found.numpy(), wanted)
    assert np.array_equal(read_image(tmp_path / "a.npy", window=WINDOW).numpy(), wanted[:, 2:5, 1:8])
    assert shape_and_dtype_of(tmp_path / "a.npy") == (wanted.shape, found.dtype)


class Noted(np.memmap):
    """Notes how many pixels are taken of it."""

    taken: list[int] = []

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if isinstance(found, np.ndarray) and self.ndim == 3:
            Noted.taken.append(found.size)
        return found


@pytest.mark.parametrize("last", [False, True])
def test_a_window_of_an_npy_file_is_read_alone(tmp_path, monkeypatch, last):
    """The file has 6 GB of holes: read whole, it would take that memory."""
    height, width = 40_000, 50_000
    for split in ("train", "val"):
        path = tmp_path / split / "cell" / "a.npy"
        path.parent.mkdir(parents=True)
        shape = (height, width, 3) if last else (3, height, width)
        file = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        (file.transpose(2, 0, 1) if last else file)[:, 30_000:30_004, 20:25] = np.arange(60).reshape(3, 4, 5)
        file.flush()
        del file
    plain, Noted.taken = np.lib.format.open_memmap, []
    monkeypatch.setattr(np.lib.format, "open_memmap", lambda *args, **options: plain(*args, **options).view(Noted))
    tracemalloc.start()
    dataset = open_dataset(DataConfig(name="imagefolder", path=str(tmp_path)))
    assert dataset.train.shape(0) == (3, height, width)
    image, label = dataset.train.read_window(0, (Interval(30_000, 30_004), Interval(20, 25)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(image.flatten(), torch.arange(60, dtype=torch.uint8)) and label == 0
    assert max(Noted.taken) == 60 and peak < 1_000_000, (Noted.taken, peak)


# ---------------------------------------------------------------------------------------------- files of several dtypes


def opened(place: Path, *, first: np.ndarray, second: np.ndarray, **options) -> Dataset:
    """Two images to train on and one to evaluate, in the order of their names."""
    for name, array in (("train/cell/a", first), ("train/cell/b", second), ("val/cell/c", first)):
        path = place / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    return open_dataset(DataConfig(name="imagefolder", path=str(place), options={"channels": 1} | options))


GREY8 = (GREY16 >> 8).astype(np.uint8)


def test_an_8_bit_image_among_16_bit_ones_keeps_its_place_in_the_range(tmp_path):
    dataset = opened(tmp_path, first=GREY16, second=GREY8)
    assert dataset.dtype == torch.uint16
    found = dataset.train.read(1)[0].numpy()
    assert np.array_equal(found[0], GREY8.astype(np.uint16) * 257) and GREY8.max() <= 255
    assert np.array_equal(found[0] / 65535, GREY8 / 255)
    assert np.array_equal(dataset.train.read(0)[0].numpy()[0], GREY16)


def test_a_16_bit_image_among_8_bit_ones_is_an_error_unless_8_bits_are_asked_for(tmp_path):
    dataset = opened(tmp_path, first=GREY8, second=GREY16)
    with pytest.raises(BadImageError, match=r"b\.png .*its pixels are uint16 and those of the others uint8.*dtype=uint16"):
        dataset.train.read(1)
    for options in ({"dtype": "uint8"}, {"dtype": "uint16"}):
        dataset = opened(tmp_path, first=GREY8, second=GREY16, **options)
        one, two = (dataset.train.read(index)[0].numpy()[0] for index in (0, 1))
        wide = options["dtype"] == "uint16"
        assert np.array_equal(one, GREY8.astype(np.uint16) * 257 if wide else GREY8)
        assert np.array_equal(two, GREY16 if wide else GREY16 >> 8) and one.dtype == two.dtype == options["dtype"]


def test_16_bits_that_need_their_upper_half_do_not_become_signed(tmp_path):
    low = opened(tmp_path / "low", first=GREY16 // 2, second=GREY16 // 2, dtype="int16")
    assert np.array_equal(low.train.read(0)[0].numpy()[0], GREY16 // 2) and low.train.read(0)[0].dtype == torch.int16
    high = opened(tmp_path / "high", first=GREY16, second=GREY16, dtype="int16")
    with pytest.raises(BadImageError, match="its pixels are uint16 and those of the others int16"):
        high.train.read(0)


# ---------------------------------------------------------------------------------------------- channels


RGB8 = (RGB16 >> 8).astype(np.uint8)
ALPHA8 = np.dstack([RGB8, GREY8])
CHANNELS = {
    "RGB as grey": (RGB8, 1, np.array(Image.fromarray(RGB8).convert("L"))[None]),
    "RGB as it is": (RGB8, None, RGB8.transpose(2, 0, 1)),
    "grey as it is": (GREY8, None, GREY8[None]),
    "grey as RGB": (GREY8, 3, np.stack([GREY8] * 3)),
    "grey of 16 bits as RGB": (GREY16, 3, np.stack([GREY16] * 3)),
    "RGBA as it is": (ALPHA8, None, ALPHA8.transpose(2, 0, 1)),
    "RGBA as four": (ALPHA8, 4, ALPHA8.transpose(2, 0, 1)),
    "RGBA as RGB": (ALPHA8, 3, RGB8.transpose(2, 0, 1)),
    "RGBA as grey": (ALPHA8, 1, np.array(Image.fromarray(RGB8).convert("L"))[None]),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_images_in_class_folders_have_the_channels_that_are_asked_for(tmp_path, name):
    stored, channels, wanted = CHANNELS[name]
    dataset = opened(tmp_path, first=stored, second=stored, channels=channels)
    assert dataset.channels == len(wanted) == len(dataset.mean) == len(dataset.std) and dataset.train.shape(0) == wanted.shape
    assert np.array_equal(dataset.train.read(0)[0].numpy(), wanted)
    assert np.array_equal(dataset.train.read_window(0, WINDOW)[0].numpy(), wanted[:, 2:5, 1:8])


@pytest.mark.parametrize(
    ("channels", "told"), [(0, "channels is 0; give a number"), ("rgb", "channels is 'rgb'"), (True, "channels is True")]
)
def test_channels_that_are_no_number_are_refused(tmp_path, channels, told):
    with pytest.raises(ValueError, match=told):
        opened(tmp_path, first=GREY8, second=GREY8, channels=channels)


@pytest.mark.parametrize("channels", [2, 5])
def test_an_image_that_lacks_the_channels_is_named(tmp_path, channels):
    with pytest.raises(BadImageError, match=rf"a\.png .*it has 3 channels of uint8 and {channels} are wanted.*channels=3"):
        opened(tmp_path, first=RGB8, second=RGB8, channels=channels).train.read(0)
