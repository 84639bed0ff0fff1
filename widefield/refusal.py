"""Whose error is it?  What widefield raises is words for the user; what anything else raises wants its traceback."""

from __future__ import annotations

import os
import sys
import traceback

FOLLOWED = 3
"""Status of a rank that ends because another failed; a launcher looks for that one."""


def is_ours(error: BaseException) -> bool:
    """Whether widefield itself raised it, in words meant for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("widefield")


def say(error: Exception, *, is_rank: bool) -> int | None:
    """Say what an error is; the status for the shell.  None, and not a word, where Python's own traceback says it best."""
    told = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(told) if told.isdecimal() else 0
    if isinstance(error, (ValueError, NotImplementedError)) and is_ours(error):
        return _refuse(error, rank)
    if not is_rank:
        return None
    from widefield.engine.failure import PeerFailedError, in_words

    if isinstance(error, PeerFailedError):
        print(f"widefield: rank {rank}: {error}", file=sys.stderr, flush=True)
        return FOLLOWED
    traceback.print_exception(error)
    print(f"widefield: rank {rank} {in_words(error)}", file=sys.stderr, flush=True)
    return 1


def _refuse(error: Exception, rank: int) -> int:
    """Say what is wrong, once: of an error that all ranks raise together, rank 0 speaks."""
    from widefield.engine.mesh import AgreedError

    if rank == 0 or not isinstance(error, AgreedError):
        print(printable(f"widefield: {'' if rank == 0 else f'rank {rank}: '}{error}"), file=sys.stderr, flush=True)
    return 2


def printable(text: str) -> str:
    """`text` with control characters (as file names may hold) spelled out."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
