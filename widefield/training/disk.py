"""Writing to a disk that may be full.

A run needs its checkpoints, its record and, at its end, its weights.  All other files are views of these: where one cannot be
written, the run warns once and goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST_BYTES = 16 * 2**20
"""The most bytes of lines that wait in memory for a full disk: those of some fifty thousand steps."""


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder, which need not exist yet; 0 where that cannot be found out."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    return 0


def reason_of(error: BaseException) -> str:
    """An error as text; where an OSError is its cause, as when a serializer wraps one, that one's."""
    deepest: BaseException | None = error
    while deepest is not None and not isinstance(deepest, OSError):
        deepest = deepest.__cause__ or deepest.__context__
    if deepest is not None or isinstance(error, ValueError):
        return str(deepest or error)
    return f"{type(error).__name__}: {error}"


def in_words(what: str | Path, error: BaseException, folder: Path) -> str:
    """`runs/1/config.yaml cannot be written: [Errno 28] No space left on device; 0 bytes are free in runs/1`."""
    return f"{what} cannot be written: {reason_of(error)}; {free_bytes(folder):,} bytes are free in {folder}"


class Attempts:
    """For work that a run can do without: `attempt("summary.csv", work)` returns what `work` does, or warns and returns None.

    It warns once for each name.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._warned: set[str] = set()

    def __call__(self, what: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:
            if what not in self._warned:
                self._warned.add(what)
                cure = "The run goes on without; free some space there, or see to the disk"
                self._warn(f"{in_words(what, error, self._folder)}. {cure}")
            return None


class Lines:
    """A file that text is appended to.  What cannot be written waits in memory and is tried again with the next text.

    The order is kept, and a partly written text is completed before the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        """Why lines wait; None where none do."""
        self._waiting = bytearray()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    def add(self, text: str) -> None:
        """Write the text, or keep it in memory for the next call."""
        assert self._file is not None, "lines are added to an open file"
        self._waiting += text.encode("utf-8", "backslashreplace")
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Sync and close the file; a second call does nothing.  `error` is set where that failed."""
        if self._file is None:
            return
        self.add("")
        try:
            os.fsync(self._file)
        except OSError as error:
            self.error = self.error or error
        os.close(self._file)
        self._file = None


def replace_text(path: Path, text: str, *, is_private: bool = False) -> None:
    """Replace the content of `path` atomically: write a file beside it, sync, rename.  UTF-8; lone surrogates are escaped.

    is_private: only the file's owner can read it.
    """
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            if is_private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()  # a partial file would take space on the full disk
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
