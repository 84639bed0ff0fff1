"""Ranks that compute on the same cores divide them, so that each has its own.

Where they do not, Linux moves them and gloo's threads between cores.  A thread that is to wake a rank then stands behind
another rank's computation while a core is idle, and a message between ranks that compute takes 0.7 ms in place of 0.2
(docs/log.md, 2026-11-29).
"""

from __future__ import annotations

import contextlib
import os
import socket
import zlib

import torch
import torch.distributed as dist

from widefield import cores
from widefield.comm.collectives import all_gather_single
from widefield.comm.roll_call import boot_id

SWITCH = "WIDEFIELD_BIND_CORES"
"""Set to 0, a rank runs wherever the system puts it."""


def divide(device: torch.device, everyone: dist.ProcessGroup) -> None:
    """Keep this rank's threads to its own share of the cores.  Every rank calls it.  everyone: their group.

    Nothing changes on GPUs; where ranks are kept to different cores already, as Slurm and taskset do; and where the ranks of
    the same cores, or the threads that they compute with, are more than these.
    """
    if device.type != "cpu" or dist.get_backend(everyone) != "gloo":
        return
    allowed = cores.allowed_cores()
    is_on = bool(allowed) and os.environ.get(SWITCH) != "0"
    own = torch.tensor([_name_of(allowed) if is_on else -1 - everyone.rank(), torch.get_num_threads()])
    of_ranks = own.new_empty(everyone.size(), 2)
    all_gather_single(of_ranks, own[None], everyone)
    sharing = (of_ranks[:, 0] == own[0]).nonzero()[:, 0].tolist()
    if len(sharing) < 2 or len(allowed) < len(sharing) * int(of_ranks[sharing, 1].max()):
        return
    with contextlib.suppress(OSError):  # not allowed: it runs as before, and only slower
        cores.bind(cores.share_of(allowed, sharing.index(everyone.rank()), len(sharing)))


def undo() -> None:
    """Let this rank's threads run wherever the process might run before."""
    cores.unbind()


def _name_of(allowed: set[int]) -> int:
    """A number that is the same for processes that may run on the same cores of the same machine, in whatever container."""
    return zlib.crc32(f"{boot_id() or socket.gethostname()} {sorted(allowed)}".encode())
