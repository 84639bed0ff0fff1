"""How many of the machine's cores may be used here?"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may use: fewer than the machine has where taskset, Slurm or a container binds it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
