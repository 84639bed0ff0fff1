"""Class numbers of a large image while it is predicted: a plain file that several ranks write, and a journal of its windows.

    FOLDER/labels.raw       numbers row by row, of the whole image; its place on the disk is taken before the first one
    FOLDER/about.json       what they are of
    FOLDER/windows_R.jsonl  the windows that rank R has written

A compressed file can be neither written by several processes nor survive a kill; this can both.  A window is noted when it is
on the disk, so that a command that was stopped goes on where it was.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.quantity import bytes_text

Array = np.ndarray[Any, Any]
Window = tuple[slice, ...]
RAW, ABOUT = "labels.raw", "about.json"


@dataclass
class RawLabels:
    """size: (H, W), or (D, H, W) of a volume.  rank: of this process."""

    folder: Path
    size: tuple[int, ...]
    dtype: str
    rank: int = 0
    done: set[tuple[int, ...]] = field(default_factory=set)
    """Windows of all ranks that were written before this process began, and those that it wrote: starts and stops by dim."""

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * np.dtype(self.dtype).itemsize

    def begin(self, about: Mapping[str, Any]) -> bool:
        """Take the place on the disk; one rank calls it, before the others `open`.  True: an earlier command began it.

        about: what the numbers are of; those of something else are thrown away.
        OSError: the disk is full, before anything is computed.
        """
        text = json.dumps({**about, "size": self.size, "dtype": self.dtype}, sort_keys=True)
        raw, noted = self.folder / RAW, self.folder / ABOUT
        if raw.is_file() and raw.stat().st_size == self.bytes and noted.is_file() and noted.read_text("utf-8") == text:
            return True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        free = shutil.disk_usage(self.folder).free
        if free < self.bytes:
            why = f"{bytes_text(self.bytes)} are needed for the labels and {bytes_text(free)} are free"
            raise OSError(errno.ENOSPC, why, str(self.folder))
        with raw.open("wb") as file:
            _allocate(file.fileno(), self.bytes)
        noted.write_text(text, encoding="utf-8")
        return False

    def open(self) -> None:
        """Read which windows are written; every rank calls it before any writes."""
        self.done.clear()
        for journal in self.folder.glob("windows_*.jsonl"):
            for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
                if (window := _window_in(line)) is not None:
                    self.done.add(window)

    def has(self, window: Window) -> bool:
        return self._note(window) in self.done

    def write(self, window: Window, labels: Array) -> None:
        """Write a window, and note it once the disk has it.  OSError: the disk refuses it."""
        window = window[-len(self.size) :]
        pixels = np.ascontiguousarray(labels, dtype=self.dtype)
        with (self.folder / RAW).open("r+b", buffering=0) as file:
            for row, offset in self._rows(window):
                _write_all(file.fileno(), memoryview(pixels[row]).cast("B"), offset)
            os.fsync(file.fileno())
        note = self._note(window)
        with (self.folder / f"windows_{self.rank}.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(f"\n{json.dumps(note)}\n")  # after a line that a kill left incomplete, on a new one
        self.done.add(note)

    def read(self, box: Box) -> Array:
        """The numbers in a box, of its size."""
        window = tuple(slice(one.start, one.stop) for one in box)
        found = np.empty([len(one) for one in box], dtype=self.dtype)
        with (self.folder / RAW).open("rb", buffering=0) as file:
            for row, offset in self._rows(window):
                _read_all(file.fileno(), memoryview(found[row]).cast("B"), offset)
        return found

    def _rows(self, window: Window) -> Iterator[tuple[tuple[int, ...], int]]:
        """The rows of a window: where each is in the window, and at which byte of the file."""
        *outer, columns = window
        if columns.stop <= columns.start:
            return
        for row in np.ndindex(*(one.stop - one.start for one in outer)):
            place = 0
            for at, one, extent in zip(row, outer, self.size, strict=False):
                place = place * extent + one.start + at
            yield row, (place * self.size[-1] + columns.start) * np.dtype(self.dtype).itemsize

    def _note(self, window: Window) -> tuple[int, ...]:
        return tuple(end for one in window[-len(self.size) :] for end in (one.start, one.stop))

    def end(self) -> None:
        """Give back the place on the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _allocate(file: int, size: int) -> None:
    """Take the place on the disk now; where the file system cannot, it is at least tried to be that long."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.truncate(file, size)


def _window_in(line: str) -> tuple[int, ...] | None:
    """None for a line that a kill left incomplete."""
    try:
        return tuple(int(end) for end in json.loads(line))
    except (ValueError, TypeError):
        return None


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
