"""Image files that this process has open: some are kept, since opening one for every window would cost more than the window."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from widefield.image_files.image_file import ImageFile
from widefield.image_files.opening import open_image

MOST_OPEN = 32
"""Each has a handle of its library's, of some hundred kilobytes, and one file or more."""
_open: OrderedDict[tuple[str, int, int], ImageFile] = OrderedDict()
_lock = threading.Lock()


def opened_image(path: Path) -> ImageFile:
    """As `open_image`, but the same object as before where the file has not changed since.  Do not close it.

    OSError: there is no such file.
    """
    about = path.stat()
    key = str(path), about.st_mtime_ns, about.st_size
    with _lock:
        if key in _open:
            _open.move_to_end(key)
            return _open[key]
    image = open_image(path)
    with _lock:
        _open[key] = image
        left = [_open.popitem(last=False)[1] for _ in range(len(_open) - MOST_OPEN)]
    for old in left:
        old.close()  # who still reads it has another handle opened
    return image


def forget(path: Path) -> None:
    """Close what is kept of a file, as before it is deleted."""
    with _lock:
        left = [_open.pop(key) for key in [key for key in _open if key[0] == str(path)]]
    for old in left:
        old.close()


def _after_fork() -> None:
    """A lock that another thread held when the process was forked would be held for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
