"""An open file of an image.  A format is a subclass, which says how to open it and how to read a box of pixels."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box, full_box, holds, is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.image_files.bytes_read import add_read
from widefield.image_files.info import ImageInfo, Level

Array = np.ndarray[Any, Any]


class ImageFileError(ValueError):
    """A file cannot be read; the text names it, says why, and what to do."""


def file_and_name(path: Path) -> tuple[Path, str]:
    """`scan.h5#/raw/left` is the image /raw/left of scan.h5; a path that has no name in it, or that exists as it is, has ""."""
    front, mark, name = str(path).partition("#/")
    return (Path(front), f"/{name}") if mark and not path.exists() and Path(front).is_file() else (path, "")


class ImageFile:
    """The pixels of one file.  Threads may share it; so may processes, and it can be pickled.

    A library's handle belongs to the process that opened it: one that crosses a fork gives wrong pixels without an error.
    So each process opens a handle of its own when it first reads, and a pickle has none.
    """

    def __init__(self, path: Path, info: ImageInfo) -> None:
        """info: what `read_info` said.  Formats do not override this."""
        self.path, self.info = path, info
        self.bytes_asked = self.bytes_decoded = 0
        """Of all windows so far: of their pixels, and of the blocks that these lie in."""
        self._handles: dict[int, Any] = {}
        self._lock = threading.Lock()
        _ALL.add(self)

    # ------------------------------------------------------------------------------------------ what a format says

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        """What the file's header says.  Any error of the library: the file is damaged, or not of this format."""
        raise NotImplementedError

    def open_handle(self) -> Any:
        """The library's handle, for this process alone."""
        raise NotImplementedError

    def close_handle(self, handle: Any) -> None:
        """Close what `open_handle` gave."""
        handle.close()

    def read_box(self, handle: Any, box: Box, level: int) -> Array:
        """The pixels of a box that is not empty and inside of the level: (C, *its size).  One thread at a time calls it."""
        raise NotImplementedError

    def valid_box(self, handle: Any, box: Box, level: int, pixels: Array) -> Array | None:
        """Where the file says it by other means than `info.nodata`: bool of the box's size, whether pixels hold something."""
        return None

    # ------------------------------------------------------------------------------------------ what it is for

    def read(self, window: Sequence[Any] | None = None, level: int = 0) -> Array:
        """The pixels of a window: (C, *its size), with the dtype of `info`, in an array of its own.

        window: an interval or a slice for each axis, in pixels of the level; None: all of it.
        ValueError: it is not inside of the level, or there is no such level.  ImageFileError: the file is damaged.
        """
        box = self._box(window, level)
        if is_empty(box):
            return np.empty((self.info.channels, *size_of(box)), dtype=self.info.dtype)
        with self._lock:
            pixels = self._try(lambda handle: self.read_box(handle, box, level), box)
        wanted = (self.info.channels, *size_of(box))
        if pixels.shape != wanted:
            raise ImageFileError(f"{self.path} gave {pixels.shape} pixels for {_shown(box)}, and not {wanted}: it is damaged")
        decoded = self.cost(box, level)
        self.bytes_asked += pixels.nbytes
        self.bytes_decoded += decoded
        add_read(asked=pixels.nbytes, decoded=decoded)
        return np.array(pixels, dtype=self.info.dtype, order="C")

    def valid(self, window: Sequence[Any] | None = None, level: int = 0) -> Array | None:
        """Which pixels of a window hold something: bool, of its size.  None: the file knows of no others.

        A pixel holds nothing if all of its channels are nodata, or NaN where nodata is NaN.
        """
        box, info = self._box(window, level), self.info
        if not any(number is not None for number in info.nodata) and type(self).valid_box is ImageFile.valid_box:
            return None
        pixels = self.read(window, level)
        with self._lock:
            found = None if is_empty(box) else self._try(lambda handle: self.valid_box(handle, box, level, pixels), box)
        if any(number is not None for number in info.nodata):
            empty = np.ones(size_of(box), dtype=bool)
            for channel, number in zip(pixels, info.nodata, strict=True):
                empty &= False if number is None else np.isnan(channel) if math.isnan(number) else channel == number
            found = ~empty if found is None else found & ~empty
        return found

    def cost(self, window: Sequence[Any] | None = None, level: int = 0) -> int:
        """The bytes of the blocks that a window lies in, decoded."""
        box, about = self._box(window, level), self.info.levels[level]
        pixels = math.prod(
            _around(interval.start, interval.stop, block, extent)
            for interval, block, extent in zip(box, about.block, about.size, strict=True)
        )
        return pixels * self.info.channels * np.dtype(self.info.dtype).itemsize

    def close(self) -> None:
        """Close this process's handle; a later read opens another."""
        with self._lock:
            handle = self._handles.pop(os.getpid(), None)
            if handle is not None:
                self.close_handle(handle)

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.info.format}, {self.info.shape}, {self.info.dtype})"

    # ------------------------------------------------------------------------------------------ within

    def _box(self, window: Sequence[Any] | None, level: int) -> Box:
        about = self._level(level)
        whole = full_box(about.size)
        if window is None:
            return whole
        box = tuple(_interval(one, extent) for one, extent in zip(window, about.size, strict=False))
        if len(tuple(window)) != len(about.size) or not holds(whole, box):
            raise ValueError(
                f"the window {_shown(box)} is not inside of {self.path}, which is {' x '.join(map(str, about.size))} "
                f"({self.info.axes}) at level {level}; give an interval or a slice for each axis"
            )
        return box

    def _level(self, level: int) -> Level:
        if not 0 <= level < len(self.info.levels):
            raise ValueError(f"{self.path} has levels 0 to {len(self.info.levels) - 1}, and not {level}")
        return self.info.levels[level]

    def _try(self, action: Any, box: Box) -> Any:
        """What an action gives for this process's handle.  An error closes the handle, which it may have poisoned."""
        process = os.getpid()
        try:
            if process not in self._handles:
                self._handles = {process: self.open_handle()}  # a parent's handle is not this process's to close
            return action(self._handles[process])
        except Exception as error:  # on damaged files libraries raise many types
            handle = self._handles.pop(process, None)
            if handle is not None:
                self._close_quietly(handle)
            reason = str(error) or type(error).__name__
            raise ImageFileError(f"cannot read {_shown(box)} of {self.path} ({reason}); the file may be damaged") from None

    def _close_quietly(self, handle: Any) -> None:
        try:
            self.close_handle(handle)
        except Exception:  # the error that is under way says more
            return


_ALL: weakref.WeakSet[ImageFile] = weakref.WeakSet()


def _after_fork() -> None:
    """A lock that another thread held when the process was forked would be held for ever."""
    for image in _ALL:
        image._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _interval(given: Any, extent: int) -> Interval:
    if isinstance(given, slice):
        start, stop, step = given.indices(extent)
        if step != 1 or (given.start or 0) < 0 or (given.stop or 0) < 0:
            raise ValueError(f"{given} is to have a start and a stop in pixels of the whole, and no step")
        return Interval(start, extent if given.stop is None else given.stop)
    return Interval(int(given.start), int(given.stop))


def _around(start: int, stop: int, block: int, extent: int) -> int:
    """How many pixels the blocks hold that an interval lies in, of one dim."""
    if stop <= start:
        return 0
    return min(extent, -(-stop // block) * block) - start // block * block


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{interval.start}:{interval.stop}" for interval in box) + "]"
