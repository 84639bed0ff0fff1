"""Collectives under one name in every version of torch, an asynchronous copy of a result to the host, runs of tensors.

torch 2.14 renames `all_gather_into_tensor` and warns at every call of the old name; earlier releases have only the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(gathered: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Concatenate every rank's `part` along dim 0 into `gathered`, in the order of the group's ranks."""
    return _ALL_GATHER(gathered, part, group=group, async_op=async_op)


def reduce_scatter_single(part: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Sum every rank's `whole`, and give each rank its `part` of dim 0, in the order of the group's ranks."""
    return _REDUCE_SCATTER(part, whole, group=group, async_op=async_op)


def copy_to_host_async(tensor: Tensor, work: dist.Work | None) -> Callable[[], list[float]]:
    """Start to copy a GPU's `tensor` to the host once `work` is done; the function returned waits and gives the numbers.

    The copy has a CUDA stream of its own, so the wait is not for kernels that are queued after this call.
    """
    copy_stream, done = torch.cuda.Stream(tensor.device), torch.cuda.Event()
    copy_stream.wait_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(copy_stream):
        if work is not None:
            work.wait()
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(copy_stream)
        done.record()

    def numbers() -> list[float]:
        done.synchronize()
        return host.tolist()

    return numbers


def runs_of(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """The tensors in groups of one dtype and device, each up to `most` bytes."""
    runs: list[list[Tensor]] = []
    for tensor in sorted(tensors, key=lambda each: (str(each.dtype), str(each.device))):
        run = runs[-1] if runs else []
        fits = run and (run[0].dtype, run[0].device) == (tensor.dtype, tensor.device)
        if not fits or sum(each.nbytes for each in run) + tensor.nbytes > most:
            runs.append([])
        runs[-1].append(tensor)
    return runs
