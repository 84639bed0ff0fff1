"""NumPy's .npy: (H, W), (D, H, W), (C, H, W), (H, W, C) or (C, D, H, W), of numbers or bools; mapped, not read.

Of three dims, the first is channels where it is at most 4 and the last is longer, the last where it is at most 4; otherwise the
array is a volume.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from widefield.geometry.box import Box, slices
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level

NAME = "NumPy"
SUFFIXES = (".npy",)
EXTRA = ""
PRIORITY = 0
MAGIC = b"\x93NUMPY"
MOST_CHANNELS = 4


def claims(path: Path, start: bytes) -> bool:
    return start.startswith(MAGIC)


def open_image(path: Path) -> ImageFile:
    return NumpyFile(path, NumpyFile.read_info(path))


class NumpyFile(ImageFile):
    """Its handle is the array of (C, *axes), mapped."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        array = _mapped(path)
        return ImageInfo(
            format=NAME, reader=f"numpy {np.__version__}", axes="ZYX"[-(array.ndim - 1) :], channels=len(array),
            dtype=array.dtype.newbyteorder("=").name, levels=one_level(array.shape[1:], (1,) * (array.ndim - 1)),
        )  # fmt: skip

    def open_handle(self) -> Array:
        return _mapped(self.path)

    def close_handle(self, handle: Array) -> None:
        """The map goes with the last array that refers to it."""

    def read_box(self, handle: Array, box: Box, level: int) -> Array:
        return handle[:, *slices(box)]


def _mapped(path: Path) -> Array:
    """(C, H, W) or (C, D, H, W).  ValueError: another number of dims, or things that are no numbers."""
    array = np.lib.format.open_memmap(path, mode="r")  # unlike np.load it never unpickles
    if array.dtype.kind not in "biuf" or not array.size:
        raise ValueError(f"an array of {array.dtype} of shape {array.shape} is no image; save numbers")
    if array.ndim == 2:
        return array[None]
    if array.ndim == 4:
        return array
    if array.ndim != 3:
        raise ValueError(f"an array of shape {array.shape} is no image; save (H, W), (C, H, W), (H, W, C) or (C, D, H, W)")
    if array.shape[0] <= MOST_CHANNELS < array.shape[2]:
        return array
    return np.moveaxis(array, 2, 0) if array.shape[2] <= MOST_CHANNELS else array[None]


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (C, *axes)."""
    np.save(path, pixels)


CASES = [
    ("image.npy", (3, 37, 50), "uint8"),
    ("volume.npy", (1, 9, 21, 30), "int16"),
    ("channels.npy", (2, 7, 12, 11), "float32"),
]
"""A file's name, the (C, *axes) that `write_example` gets, and their dtype."""
