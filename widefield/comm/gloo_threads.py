"""Gloo's threads wait for a free core, in place of taking one from a thread that computes or sends.

A rank that posts a message holds a lock of its connection meanwhile.  What it writes wakes gloo's thread, which Linux then
likes to run at once on the same core: it finds the lock taken, asks again without a pause, and keeps the core from the one
that holds the lock until its time is up, 2 to 5 ms later.  One in five messages was that late where ranks have a core each
(docs/log.md, 2026-11-27).  A thread of SCHED_BATCH never takes a core from another one; it has as much of it otherwise.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOOP = "gloo_tcp_loop"
"""The name that gloo gives the thread of each group's connections."""


def keep_gloo_from_preempting() -> None:
    """For the groups that this process has now.

    Nothing changes where there is no /proc, where it is not allowed, and where the user has given the process a policy.
    """
    for task in Path("/proc/self/task").glob("*"):
        thread = int(task.name)
        with contextlib.suppress(OSError):  # ended meanwhile, or not allowed
            if (task / "comm").read_text().strip() == LOOP and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
