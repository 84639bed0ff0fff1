"""Pixels of a large image in a plain file, which several ranks write by window: planes, one behind the other, row by row."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box

Array = np.ndarray[Any, Any]
Window = tuple[slice, ...]


@dataclass(frozen=True)
class RawPixels:
    """size: (H, W), or (D, H, W) of a volume.  planes: how many numbers of `dtype` a pixel has."""

    path: Path
    size: tuple[int, ...]
    dtype: str
    planes: int = 1

    @property
    def bytes(self) -> int:
        return self.planes * math.prod(self.size) * np.dtype(self.dtype).itemsize

    def is_whole(self) -> bool:
        """Whether the file is there, as long as it is to be."""
        return self.path.is_file() and self.path.stat().st_size == self.bytes

    def allocate(self) -> None:
        """Take the place on the disk.  OSError: it is full."""
        with self.path.open("wb") as file:
            _allocate(file.fileno(), self.bytes)

    def write(self, window: Window, pixels: Array) -> None:
        """Write a window of all planes: (planes, *its size); the disk has it then.  OSError: the disk refuses it."""
        pixels = np.ascontiguousarray(pixels, dtype=self.dtype)
        with self.path.open("r+b", buffering=0) as file:
            for number, plane in enumerate(pixels):
                for row, offset in self._rows(window, number):
                    _write_all(file.fileno(), memoryview(plane[row]).cast("B"), offset)
            os.fsync(file.fileno())

    def read(self, box: Box, plane: int = 0) -> Array:
        """The numbers of a plane in a box, of its size."""
        window = tuple(slice(one.start, one.stop) for one in box)
        found = np.empty([len(one) for one in box], dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            for row, offset in self._rows(window, plane):
                _read_all(file.fileno(), memoryview(found[row]).cast("B"), offset)
        return found

    def _rows(self, window: Window, plane: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The rows of a window: where each is in the window, and at which byte of the file."""
        *outer, columns = window
        if columns.stop <= columns.start:
            return
        for row in np.ndindex(*(one.stop - one.start for one in outer)):
            place = plane
            for at, one, extent in zip((0, *row), (slice(0, 1), *outer), (1, *self.size[:-1]), strict=True):
                place = place * extent + one.start + at
            yield row, (place * self.size[-1] + columns.start) * np.dtype(self.dtype).itemsize


def _allocate(file: int, size: int) -> None:
    """Take the place on the disk now; where the file system cannot, it is at least tried to be that long."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.truncate(file, size)


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _read_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.preadv(file, [content], offset)
        if count == 0:
            why = "the file of labels became shorter; see to the disk, and add --overwrite to begin again"
            raise OSError(errno.EIO, why)
        content, offset = content[count:], offset + count
