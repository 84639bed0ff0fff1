"""Class numbers of a large image while it is predicted: a plain file that several ranks write, and a journal of its windows.

    FOLDER/labels.raw         numbers row by row, of the whole image; its place on the disk is taken before the first one
    FOLDER/probabilities.raw  where they are wanted: those of each class, one class behind the other
    FOLDER/about.json         what they are of
    FOLDER/windows_R.jsonl    the windows that rank R has written, of both

A compressed file can be neither written by several processes nor survive a kill; this can both.  A window is noted when it is
on the disk, so that a command that was stopped goes on where it was.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from widefield.geometry.box import Box
from widefield.prediction.raw_pixels import Array, RawPixels, Window
from widefield.quantity import bytes_text

RAW, LIKELY, ABOUT = "labels.raw", "probabilities.raw", "about.json"


@dataclass
class RawLabels:
    """size: (H, W), or (D, H, W) of a volume.  rank: of this process.

    likely: of probabilities, how many classes and the dtype; None: there are none.
    """

    folder: Path
    size: tuple[int, ...]
    dtype: str
    rank: int = 0
    likely: tuple[int, str] | None = None
    done: set[tuple[int, ...]] = field(default_factory=set)
    """Windows of all ranks that were written before this process began, and those that it wrote: starts and stops by dim."""

    @property
    def labels(self) -> RawPixels:
        return RawPixels(self.folder / RAW, self.size, self.dtype)

    @property
    def probabilities(self) -> RawPixels | None:
        return None if self.likely is None else RawPixels(self.folder / LIKELY, self.size, self.likely[1], self.likely[0])

    def begin(self, about: Mapping[str, Any]) -> bool:
        """Take the place on the disk; one rank calls it, before the others `open`.  True: an earlier command began it.

        about: what the numbers are of; those of something else are thrown away.
        OSError: the disk is full, before anything is computed.
        """
        text = json.dumps({**about, "size": self.size, "dtype": self.dtype, "likely": self.likely}, sort_keys=True)
        raw, noted = [one for one in (self.labels, self.probabilities) if one is not None], self.folder / ABOUT
        if all(one.is_whole() for one in raw) and noted.is_file() and noted.read_text("utf-8") == text:
            return True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._check_free()
        for one in raw:
            one.allocate()
        noted.write_text(text, encoding="utf-8")
        return False

    def _check_free(self) -> None:
        """Probabilities hardly become less when their file is made, and both are there then."""
        needed, free = self.labels.bytes, shutil.disk_usage(self.folder).free
        what = "the labels"
        if self.probabilities is not None:
            needed, what = needed + 2 * self.probabilities.bytes, "the labels and twice the probabilities, as a file too,"
        if free < needed:
            why = f"{bytes_text(needed)} are needed for {what} and {bytes_text(free)} are free"
            raise OSError(errno.ENOSPC, why, str(self.folder))

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
        """Write a window, and note it once the disk has it: last of all that is written of it.

        OSError: the disk refuses it.
        """
        self.labels.write(window[-len(self.size) :], labels[None])
        note = self._note(window)
        with (self.folder / f"windows_{self.rank}.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(f"\n{json.dumps(note)}\n")  # after a line that a kill left incomplete, on a new one
        self.done.add(note)

    def read(self, box: Box) -> Array:
        """The numbers in a box, of its size."""
        return self.labels.read(box)

    def _note(self, window: Window) -> tuple[int, ...]:
        return tuple(end for one in window[-len(self.size) :] for end in (one.start, one.stop))

    def end(self) -> None:
        """Give back the place on the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _window_in(line: str) -> tuple[int, ...] | None:
    """None for a line that a kill left incomplete."""
    try:
        return tuple(int(end) for end in json.loads(line))
    except (ValueError, TypeError):
        return None
