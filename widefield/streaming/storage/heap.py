"""What becomes of the CPU's freed memory: a training step without a stream keeps it, since the next one wants it again.

It is given back to the system before memory is measured, and while a stream runs without gradients.

The C library keeps what is freed below a block that is still in use, and oneDNN leaves such blocks all over: it caches a
program for every shape of a tile.  Tiles of a volume made a process grow by some 10 MiB each (docs/log.md, 2026-11-25).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from widefield.comm.mesh import Mesh

T = TypeVar("T")
SECONDS = 1.0
"""Between two calls, at least: one takes some 50 ms where the heap has hundreds of MiB."""
LARGE_BYTES = 1 << 20
"""From so many on, memory comes from the system itself and returns to it when it is freed.  glibc raises this to 32 MiB while a
program runs, and lets tensors below lie between each other."""
_MMAP_THRESHOLD = -3
"""mallopt's number for it."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Variables of the environment by which a user tells glibc's malloc what to do."""

_called = 0.0
_is_kept = False


def keep_freed_memory() -> bool:
    """From now on, memory that tensors on the CPU give up stays with this process; returns whether it does.

    glibc returns what lies at the heap's end, and blocks above 32 MiB at once; to get it again costs a page fault for each
    4 KiB, 4 to 38 % of a step's processor time (docs/log.md, 2026-11-27).  The process then has the memory of its largest step,
    and some more for what lies between blocks.  False, and nothing is done: the C library is another one, or a variable of
    OF_THE_USER or GLIBC_TUNABLES says how memory is to be kept.
    """
    global _is_kept
    library = _glibc()
    if library is None or any(name in os.environ for name in OF_THE_USER) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    _is_kept = bool(library.mallopt(_TRIM_THRESHOLD, -1) and library.mallopt(_MMAP_MAX, 0))
    return _is_kept


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, if it was called: from now on memory returns to the system as in a program that runs long."""
    global _is_kept
    if _is_kept and (library := _glibc()) is not None:
        for option, value in ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26)):  # glibc's own
            library.mallopt(option, value)
        _is_kept = False


def keep_memory_of_steps(mesh: Mesh) -> None:
    """`keep_freed_memory` before training steps on the CPU; with a stream, whose aim is little memory, the opposite."""
    if mesh.device.type == "cpu":
        keep_freed_memory() if mesh.plan.stream is None else return_freed_memory()


def trimmed(tiles: Iterable[T], keeps: bool = False) -> Iterator[T]:
    """The tiles, one after another; between two of them the heap is trimmed, at most every `SECONDS`.

    keeps: whether a backward follows; nothing is done then, since the next step wants the memory again.
    """
    global _called
    if not keeps:
        return_freed_memory()
    trim = None if keeps else _trim()
    for tile in tiles:
        yield tile
        if trim is not None and time.monotonic() - _called >= SECONDS:
            trim(0)
            _called = time.monotonic()


def trim_heap() -> None:
    """Once, now: what is allocated afterwards is new to the system too, and seen by whoever asks it how much there is."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def _trim() -> Callable[[int], object] | None:
    """malloc_trim, with the threshold that it wants set for this process; None: the C library is another one."""
    if (library := _glibc()) is None:
        return None
    library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
    return library.malloc_trim


def _glibc() -> ctypes.CDLL | None:
    """The C library; None where it is another one, which does not trim."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
