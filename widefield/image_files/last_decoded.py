"""The block that each open file decoded last: it is kept for the file's next window, which often lies in it.

Many files may be open, and a block may be a whole picture, so that there is a bound for all files of this process together.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KEPT_BYTES = 256 * 2**20
"""Of all kept blocks but the newest, which is kept whatever its size; those that were used longest ago go first."""


class OpenBlocks:
    """What owns kept blocks: one for each handle, and they go with it."""


_kept: weakref.WeakKeyDictionary[OpenBlocks, tuple[Hashable, Array]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def last_decoded(owner: OpenBlocks, place: Hashable, decode: Callable[[], Array]) -> Array:
    """The block at a place of the owner's file: the kept one if it is that, otherwise what `decode` gives, which is kept."""
    with _lock:
        found = _kept.pop(owner, None)  # and put in again as the newest; an older block goes before the next is decoded
        if found is not None and found[0] == place:
            _kept[owner] = found
            return found[1]
    del found
    block = decode()
    with _lock:
        older = list(_kept.items())
        room = KEPT_BYTES - sum(kept.nbytes for _, (_, kept) in older)
        for other, (_, kept) in older:
            if room >= 0:
                break
            del _kept[other]
            room += kept.nbytes
        _kept[owner] = (place, block)
    return block


def _after_fork() -> None:
    """A lock that another thread held when the process was forked would be held for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
