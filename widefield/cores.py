"""Which of the machine's cores may be used here, and which of them does this process keep to?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

_unbound: set[int] = set()
"""The cores that this process might use before it was bound; empty while it is not."""


def usable_cores() -> int:
    """The cores that this process may use: fewer than the machine has where taskset, Slurm or a container binds it.

    Cores count also where it keeps to some of them, since the others are for the other ranks of its run.
    """
    return len(_unbound) or len(allowed_cores()) or os.cpu_count() or 1


def allowed_cores() -> set[int]:
    """The numbers of the cores on which this thread may run; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def bind(cores: Collection[int]) -> None:
    """Keep this process's threads, and those that it starts, to these cores.  OSError: it is not allowed to use them."""
    before = _unbound or allowed_cores()
    _set_affinity(cores)
    _unbound.update(before)


def unbind() -> None:
    """Undo `bind`."""
    if _unbound:
        with contextlib.suppress(OSError):  # the system has taken these cores away meanwhile
            _set_affinity(_unbound)
        _unbound.clear()


def _set_affinity(cores: Collection[int]) -> None:
    os.sched_setaffinity(0, cores)
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


def share_of(cores: Iterable[int], part: int, parts: int) -> list[int]:
    """The cores of the `part`-th of so many processes, of nearly equal numbers: whole processors and whole caches first.

    Two numbers may be threads of one core; Linux numbers them apart.
    """
    ordered = sorted(cores, key=lambda number: (*_place(number), number))
    return ordered[part * len(ordered) // parts : (part + 1) * len(ordered) // parts]


def _place(number: int) -> tuple[int, int]:
    """Of a core: its processor and its number there, the same for all of its threads; zeros where the system does not tell."""
    folder = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, 0
