"""How errors are shown: a sentence on stderr and an exit status; a traceback for unexpected errors."""

from __future__ import annotations

import os
import sys
import traceback

from widefield.redaction import redacted
from widefield.refusal import REFUSED, is_ours, printable

_RANKS = ("WIDEFIELD_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PET_NODE_RANK")
"""Variables with this process's rank, the first that is set; launchers/ knows more of them."""


def say(error: Exception, *, is_rank: bool) -> int | None:
    """Print an error; returns the exit status.  None, and nothing is printed, where Python should print a traceback."""
    variable = next((value for name in _RANKS if (value := os.environ.get(name))), "0")
    rank = int(variable) if variable.isdecimal() else 0
    if isinstance(error, (ValueError, NotImplementedError)) and is_ours(error):
        return _refuse(error, rank)
    if not is_rank:
        return None
    from widefield.comm.failure import PeerFailedError, in_words

    if isinstance(error, PeerFailedError):
        _print_error(f"rank {rank}: {error}")
        return error.status
    print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    _print_error(f"rank {rank} {in_words(error)}")
    return 1


def _refuse(error: Exception, rank: int) -> int:
    """Print a refusal; one that all ranks raise together is printed by rank 0 only."""
    if rank == 0:
        _print_error(str(error))
        return REFUSED
    from widefield.comm.mesh import AgreedError

    if not isinstance(error, AgreedError):
        _print_error(f"rank {rank}: {error}")
    return REFUSED


def _print_error(text: str) -> None:
    print(printable(f"widefield: {redacted(text)}"), file=sys.stderr, flush=True)
