"""Where does the memory of whole tensors come from, and who has it next?

What a system asks for pages that are touched first is many times what a copy into them costs: they are found, filled with
zeros, in a file given a place on the disk, and on a virtual machine fetched from its host.  So a `Pool` hands on what was used
before, from one tensor to the next and from one step to the next.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import sys
import tempfile
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
"""The largest page: where a file's lie so, one comes whole with the first byte that is touched, and has to go whole."""
HOST_WASTE = 1.25
"""Memory is asked for within a budget, so that large blocks must not go to small tensors.  Of a disk there is more."""

_DROP: int | None = getattr(mmap, "MADV_DONTNEED", None)
_FREE: int | None = getattr(mmap, "MADV_FREE", None)
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_POPULATE_WRITE: int | None = 23 if sys.platform == "linux" else None
"""Make pages ready to be written to, all at once and not each as it is first touched (Linux 5.14)."""


class Block:
    """Memory of a process, zeros at first: its own, of large pages where the system has such, or that of a file without a name.

    folder: of the file, "": the system's for temporary files; None: no file.
    Errors: OSError, in words, where the file does not fit or cannot be made.
    """

    def __init__(self, size_bytes: int, folder: str | None) -> None:
        self.bytes = size_bytes
        if folder is None:
            self.map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._advise(_HUGE, 0, size_bytes)
            return
        folder = folder or tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), size_bytes)
                self.map = mmap.mmap(file.fileno(), size_bytes)
        except OSError as error:
            raise OSError(
                f"no file of {size_bytes:,} bytes, to keep a tensor in, can be made in {folder}: {error.strerror or error}; "
                "make room there, name a folder on a disk that has it, or keep tensors on the host"
            ) from error

    def make_ready(self, start: int, stop: int) -> None:
        """Before these bytes of a file are written to; without it they could be, at many times the cost."""
        self._advise(_POPULATE_WRITE, start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Take these bytes of a file out of what this process holds; the system keeps them while it has memory to spare."""
        self._advise(_DROP, start // HUGE_BYTES * HUGE_BYTES, min(-(-stop // HUGE_BYTES) * HUGE_BYTES, self.bytes))

    def rest(self) -> None:
        """While nobody has this memory, the system may take of it what it needs for others; a file's it may at any time."""
        self._advise(_FREE, 0, self.bytes)

    def _advise(self, advice: int | None, start: int, stop: int) -> None:
        """A system that does not know the advice goes on as it is."""
        if advice is not None:
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):
                self.map.madvise(advice, start, stop - start)


def _reserve(file: int, size_bytes: int) -> None:
    """Give a file its size and room on the disk: memory that finds the disk full later kills the process without a word."""
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except (AttributeError, OSError) as error:  # macOS has no such function, some file systems no such thing
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        disk = os.fstatvfs(file)
        if disk.f_bavail * disk.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(file, size_bytes)


class FreeList:
    """Blocks of one kind: those that tensors have, and those that wait for the next.

    folder: as of `Block`.  most_idle: bytes that wait at most.
    most_waste: a tensor is not given a block of more than so many times its size.
    """

    def __init__(self, folder: str | None, most_idle: float = math.inf, most_waste: float = math.inf) -> None:
        self.folder, self.most_idle, self.most_waste = folder, most_idle, most_waste
        self.used = self.most_used = 0
        self.idle: list[Block] = []
        self._back: deque[Block] = deque()

    @property
    def idle_bytes(self) -> int:
        return sum(block.bytes for block in self.idle)

    def take(self, size_bytes: int) -> tuple[Block, Tensor]:
        """A block of so many bytes or more, and all of it as one tensor; it comes back when nobody has that memory any more."""
        self._sort_back()
        fitting = [block for block in self.idle if size_bytes <= block.bytes <= self.most_waste * size_bytes]
        if fitting:
            block = min(fitting, key=lambda block: block.bytes)
            self.idle.remove(block)
        else:
            block = self._new(size_bytes)
        self.used += block.bytes
        self.most_used = max(self.most_used, self.used)
        array = np.frombuffer(block.map, dtype=np.uint8)
        weakref.finalize(array, self._come_back, block).atexit = False
        return block, torch.from_numpy(array)

    def _come_back(self, block: Block) -> None:
        """At any time, from any thread."""
        block.rest()
        self._back.append(block)

    def _sort_back(self) -> None:
        while self._back:
            block = self._back.popleft()
            self.used -= block.bytes
            self.idle.append(block)
        while self.idle_bytes > self.most_idle:
            self.idle.pop(0)

    def _new(self, size_bytes: int) -> Block:
        """All together never become more than tensors had at one time; what waits goes for that, the longest waiting first."""
        most = max(self.most_used, self.used + size_bytes)
        while self.idle and self.used + self.idle_bytes + size_bytes > most:
            self.idle.pop(0)
        try:
            return Block(size_bytes, self.folder)
        except OSError:
            if not self.idle:
                raise
            self.idle.clear()
            return Block(size_bytes, self.folder)


class Pool:
    """The blocks of tensors in the CPU's memory, and of those in files of `folder`; None: the system's for such, often /tmp.

    It holds no more than its tensors had at one time, and of files that wait no more than half of the machine's memory: what
    the system no longer holds in memory would have to be read before it can be written to.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.host = FreeList(None, most_waste=HOST_WASTE)
        self.file = FreeList(str(folder or ""), most_idle=memory // 2)
