"""NumPy's .npy: (H, W), (D, H, W), (C, H, W), (H, W, C) or (C, D, H, W), of numbers or bools; mapped, not read.

Which dims are channels: `dims_by_extents`.  Pages of the map count as this process's memory as long as they stay, and around a
window they are whole rows of the image; so a window is copied a few megabytes at a time, and the pages are let go after each.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from widefield.geometry.box import Box, size_of, slices
from widefield.geometry.interval import Interval, pieces_of
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.stored_array import ArrayDims, check_numbers, dims_by_extents

NAME = "NumPy"
SUFFIXES = (".npy",)
EXTRA = ""
PRIORITY = 0
MAGIC = b"\x93NUMPY"
PIECE_BYTES = 4 << 20
"""Of the map, at once."""


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
        dims, starts = dims_by_extents(handle.shape), [interval.start for interval in box]
        pixels = np.empty((dims.channels(handle.shape), *size_of(box)), dtype=handle.dtype)
        for piece in _pieces(handle, dims, box):
            place = tuple(Interval(one.start - start, one.stop - start) for one, start in zip(piece, starts, strict=True))
            pixels[:, *slices(place)] = dims.read(handle, piece)
            if isinstance(handle.base, mmap.mmap):
                handle.base.madvise(mmap.MADV_DONTNEED)
        return pixels


def _pieces(array: Array, dims: ArrayDims, box: Box) -> Iterator[Box]:
    """A box cut along its slowest dim, so that what lies between the first and the last byte of a piece is PIECE_BYTES at most.

    One step along that dim is never cut, and of channels that come first each has its own bytes.
    """
    slowest = max(range(len(box)), key=lambda axis: array.strides[dims.space[axis]])
    step_bytes = array.strides[dims.space[slowest]]
    if dims.channel is not None and array.strides[dims.channel] > step_bytes:
        step_bytes *= array.shape[dims.channel]
    step, whole = max(1, PIECE_BYTES // step_bytes), box[slowest]
    for part in pieces_of(whole, step):
        yield (*box[:slowest], part, *box[slowest + 1 :])


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
