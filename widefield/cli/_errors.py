"""What does a shell hear of an error?  A sentence on stderr and a status; a traceback where it says it best."""

from __future__ import annotations

import os
import sys
import traceback

from widefield.refusal import FOLLOWED, is_ours, printable


def say(error: Exception, *, is_rank: bool) -> int | None:
    """Say what an error is; the status for the shell.  None, and not a word, where Python's own traceback says it best."""
    reason = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(reason) if reason.isdecimal() else 0
    if isinstance(error, (ValueError, NotImplementedError)) and is_ours(error):
        return _refuse(error, rank)
    if not is_rank:
        return None
    from widefield.comm.failure import PeerFailedError, in_words

    if isinstance(error, PeerFailedError):
        _print_error(f"rank {rank}: {error}")
        return FOLLOWED
    traceback.print_exception(error)
    _print_error(f"rank {rank} {in_words(error)}")
    return 1


def _refuse(error: Exception, rank: int) -> int:
    """Say what is wrong, once: of an error that all ranks raise together, rank 0 speaks."""
    if rank == 0:
        _print_error(str(error))
        return 2
    from widefield.comm.mesh import AgreedError

    if not isinstance(error, AgreedError):
        _print_error(f"rank {rank}: {error}")
    return 2


def _print_error(text: str) -> None:
    print(printable(f"widefield: {text}"), file=sys.stderr, flush=True)
