"""Errors that widefield raises are sentences for the user; others need their traceback."""

from __future__ import annotations

import contextlib
import os
import traceback

REFUSED = 2
"""The exit status after an error that the user can change, which the same command would meet again."""
FOLLOWED = 3
"""The exit status of a rank that ends because another one failed, which the launcher then looks for."""
TO_BE_CONTINUED = 75
"""The exit status of a run that was asked to stop and did: the same command goes on with it.

EX_TEMPFAIL of sysexits.h, "the user is invited to retry": no shell, Python, Slurm or container runtime gives it a meaning of
its own.
"""
STATUSES = "WIDEFIELD_STATUSES"
"""The environment variable with a file to which a process adds its exit status, for a script that sees torchrun's only."""


def tell_status(status: int) -> None:
    """Add this process's exit status to the file that the environment names, if it does."""
    if os.environ.get(STATUSES):
        with contextlib.suppress(OSError), open(os.environ[STATUSES], "a", encoding="ascii") as file:
            file.write(f"{status}\n")


def is_ours(error: BaseException) -> bool:
    """Whether widefield itself raised the error, and not a library that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("widefield")


def printable(text: str) -> str:
    """`text` with control characters, which file names may have, escaped."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
