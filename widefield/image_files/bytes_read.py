"""How many bytes of pixels has this process read from files?  What reads a file says it here, and here alone."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class BytesRead:
    """asked: of the pixels that were asked for.  decoded: of the blocks, or of the whole files, that these lie in."""

    asked: int = 0
    decoded: int = 0

    def __add__(self, other: BytesRead) -> BytesRead:
        return BytesRead(self.asked + other.asked, self.decoded + other.decoded)

    def __sub__(self, other: BytesRead) -> BytesRead:
        return BytesRead(self.asked - other.asked, self.decoded - other.decoded)


_total = BytesRead()
_lock = threading.Lock()


def add_read(*, asked: int, decoded: int) -> None:
    """Count one reading.  Threads may call it."""
    global _total
    with _lock:
        _total += BytesRead(asked, decoded)


def bytes_read() -> BytesRead:
    """All that this process has read, and what its parent had when it was forked: subtract what it was before."""
    return _total


def _after_fork() -> None:
    """A lock that another thread held when the process was forked would be held for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
