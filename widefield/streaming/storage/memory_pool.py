"""A pool of host memory and of files, for tensors that are stored between segments.

The first touch of a page costs many times what a copy into it does: the system finds a page, fills it with zeros, allocates
disk space for a file and, on a virtual machine, gets memory from its host.  So a `Pool` reuses memory from tensor to tensor and
from step to step.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
"""The size of a huge page: where a file is cached in these, a page is mapped and dropped as a whole."""
HOST_WASTE = 1.25
"""A tensor in the host's memory gets no block of more than this times its size, since memory is planned within a budget."""

_DROP: int | None = getattr(mmap, "MADV_DONTNEED", None)
_FREE: int | None = getattr(mmap, "MADV_FREE", None)
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_POPULATE_WRITE: int | None = 23 if sys.platform == "linux" else None
"""madvise: prepare pages for writing all at once, not each at its first touch (Linux 5.14)."""


class Block:
    """A memory map, zeros at first: anonymous memory, with huge pages where there are, or a file without a name.

    folder: of the file; "": the system's for temporary files; None: no file.
    OSError: the file does not fit on the disk or cannot be made.
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
                f"no file of {size_bytes:,} bytes, to store a tensor, can be made in {folder}: {error.strerror or error}; "
                "make room there, name a folder on a disk that has it, or keep tensors on the host"
            ) from error

    def make_ready(self, start: int, stop: int) -> None:
        """Prepare these bytes of a file for writing; without it, writing costs many times more."""
        self._advise(_POPULATE_WRITE, start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Remove these bytes of a file from the process's resident memory; the system may still cache them."""
        self._advise(_DROP, start // HUGE_BYTES * HUGE_BYTES, min(-(-stop // HUGE_BYTES) * HUGE_BYTES, self.bytes))

    def rest(self) -> None:
        """Allow the system to reclaim this memory while it is idle; a file's pages it can reclaim at any time."""
        self._advise(_FREE, 0, self.bytes)

    def _advise(self, advice: int | None, start: int, stop: int) -> None:
        """Call madvise; does nothing where the system does not know the advice."""
        if advice is not None:
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):
                self.map.madvise(advice, start, stop - start)


def _reserve(file: int, size_bytes: int) -> None:
    """Set a file's size and allocate its disk space: a disk that is full at a later write kills the process with SIGBUS."""
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except (AttributeError, OSError) as error:  # macOS does not have the function, and some file systems do not support it
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        disk = os.fstatvfs(file)
        if disk.f_bavail * disk.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(file, size_bytes)


class NoBlock(Block):
    """A block of which there is nothing but the size."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes

    def _advise(self, advice: int | None, start: int, stop: int) -> None:
        """There is nothing to advise on."""


@dataclass(frozen=True)
class PlannedMemory:
    """Makes the memory of blocks where a step is only planned, and stores nothing.

    make: from their bytes, and whether they are a file.  of_gpu: the step is a GPU's, whose memory is not the host's.
    """

    make: Callable[[int, bool], Tensor]
    of_gpu: bool = False


PLANNED_MEMORY: list[PlannedMemory] = []
"""While there is one, the last counts."""


def is_planned_for_gpu() -> bool:
    """Whether a step of a GPU is planned: its tensors say that they are on a CPU, and the host's memory is another."""
    return bool(PLANNED_MEMORY) and PLANNED_MEMORY[-1].of_gpu


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, apart from the host's."""
    return device.type != "cpu" or is_planned_for_gpu()


class FreeList:
    """Blocks of one kind, in use or idle.

    folder: as of `Block`.  most_idle: the largest number of idle bytes.
    most_waste: a tensor gets no block of more than this times its size.
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
        """A block of at least so many bytes, and a uint8 tensor of all of it; it becomes idle once no tensor refers to it."""
        if PLANNED_MEMORY:
            return NoBlock(size_bytes), PLANNED_MEMORY[-1].make(size_bytes, self.folder is not None)
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
        """Called by the garbage collector, at any time and from any thread."""
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
        """A new block; first drops idle blocks, the oldest first, so that all blocks stay within the peak of those in use."""
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
    """The free lists of host memory and of files in `folder`; None: the system's folder for temporary files, often /tmp.

    The pool is never larger than the peak of its tensors.  Idle files take at most half of the machine's memory: pages that the
    system no longer caches would have to be read from the disk before they are written.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.host = FreeList(None, most_waste=HOST_WASTE)
        self.file = FreeList(str(folder or ""), most_idle=memory // 2)
