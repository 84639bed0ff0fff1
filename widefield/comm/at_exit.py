"""What a process with a process group does before its interpreter ends: it waits for the threads that still work.

A worker thread of gloo frees the tensors of a message after it has reported the message done.  Where it holds the last
reference to one, it wants the interpreter's lock for that; an interpreter that has begun to end never gives it, and C++ ends
the process with "terminate called without an active exception" (SIGABRT), whatever had been computed.  On a busy machine a
thread can be suspended just there while a short script ends.  `destroy_process_group` does not join these threads as long as
anything, as a model under DDP, refers to the group.  So the main thread leaves the lock to others until they sleep.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from pathlib import Path

LONGEST_SECONDS = 1.0
"""For which the end waits at most: a thread of the user's may work for ever."""
STEP_SECONDS = 0.005
QUIET_STEPS = 2
"""Looks, one after the other, that must find no thread at work."""


@functools.cache
def settle_before_exit() -> None:
    """Let this process wait at its end, once, until its threads sleep."""
    atexit.register(wait_for_threads)


def wait_for_threads() -> None:
    """Return when no other thread of this process is running or ready to, or after a second."""
    until, quiet = time.monotonic() + LONGEST_SECONDS, 0
    while quiet < QUIET_STEPS and time.monotonic() < until:
        time.sleep(STEP_SECONDS)  # without the interpreter's lock
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether the kernel says so of another thread; where there is no /proc nobody knows, and the steps alone are waited."""
    own = threading.get_native_id()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*"):
        if int(task.name) != own and _state(task) in ("R", "D"):
            return True
    return False


def _state(task: Path) -> str:
    """The letter of a thread's state (proc(5)): R runs or is ready to, D waits for a disk, S sleeps."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "S"
