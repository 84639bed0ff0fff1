"""Collectives under one name, whatever torch calls them, and how what they gave comes to the host.

torch 2.14 renames `all_gather_into_tensor` and warns of the old name at every call; earlier releases know only that one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_single(gathered: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Write every rank's `part` into `gathered`, one after another in the group's order."""
    return _ALL_GATHER(gathered, part, group=group, async_op=async_op)


def copy_aside(tensor: Tensor, work: dist.Work | None) -> Callable[[], list[float]]:
    """Copy a GPU's `tensor` to the host on a stream of its own, once `work` is done; what it gives waits for that alone."""
    aside, done = torch.cuda.Stream(tensor.device), torch.cuda.Event()
    aside.wait_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(aside):
        if work is not None:
            work.wait()
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(aside)
        done.record()

    def numbers() -> list[float]:
        done.synchronize()
        return host.tolist()

    return numbers
