"""NumPy's .npy: (H, W), (D, H, W), (C, H, W), (H, W, C) or (C, D, H, W), of numbers or bools; mapped, not read.

Which dims are channels: `dims_by_extents`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from widefield.geometry.box import Box
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.stored_array import check_numbers, dims_by_extents

NAME = "NumPy"
SUFFIXES = (".npy",)
EXTRA = ""
PRIORITY = 0
MAGIC = b"\x93NUMPY"


def claims(path: Path, start: bytes) -> bool:
    return start.startswith(MAGIC)


def open_image(path: Path) -> ImageFile:
    return NumpyFile(path, NumpyFile.read_info(path))


class NumpyFile(ImageFile):
    """Its handle is the array, mapped."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        array = _mapped(path)
        dims = dims_by_extents(array.shape)
        return ImageInfo(
            format=NAME, reader=f"numpy {np.__version__}", axes=dims.axes, channels=dims.channels(array.shape),
            dtype=array.dtype.newbyteorder("=").name, levels=one_level(dims.size(array.shape), (1,) * len(dims.axes)),
        )  # fmt: skip

    def open_handle(self) -> Array:
        return _mapped(self.path)

    def close_handle(self, handle: Array) -> None:
        """The map goes with the last array that refers to it."""

    def read_box(self, handle: Array, box: Box, level: int) -> Array:
        return dims_by_extents(handle.shape).read(handle, box)


def _mapped(path: Path) -> Array:
    array = np.lib.format.open_memmap(path, mode="r")  # unlike np.load it never unpickles
    check_numbers(array.dtype, array.shape)
    return array


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (C, *axes)."""
    np.save(path, pixels)


CASES = [
    ("image.npy", (3, 37, 50), "uint8"),
    ("volume.npy", (1, 9, 21, 30), "int16"),
    ("channels.npy", (2, 7, 12, 11), "float32"),
]
"""A file's name, the (C, *axes) that `write_example` gets, and their dtype."""
