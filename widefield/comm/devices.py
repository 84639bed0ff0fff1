"""Which device is a rank's, and what carries its messages?

A rank has a GPU of its own and NCCL carries its messages; where there is no GPU it computes on the CPU and gloo carries them.
NCCL takes one rank per GPU.  Ranks that are to share GPUs, as to try a plan of four ranks on one GPU, say so in the environment
(RANKS_PER_GPU).  Then gloo carries all messages, through the host's memory, which is much slower.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

RANKS_PER_GPU = "WIDEFIELD_RANKS_PER_GPU"
"""Of the environment: how many ranks may share a GPU; 1 where it is not set."""


def ranks_per_gpu() -> int:
    """How many ranks may share a GPU; the same on every rank.  ValueError: no whole number from 1 on."""
    said = os.environ.get(RANKS_PER_GPU, "1").strip()
    if not (said.isascii() and said.isdigit() and int(said) > 0):
        raise ValueError(f"{RANKS_PER_GPU}={said!r} is no number of ranks; set it to 1 or more, or leave it out")
    return int(said)


def device_of(rank: int, local_rank: int) -> torch.device:
    """The GPU of the rank that is number `local_rank` on its machine, or the CPU where there is none.

    Sets this process's current GPU.  Ranks that share GPUs are dealt out in turns.
    ValueError: more ranks than the machine's GPUs have room for.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, most = torch.cuda.device_count(), torch.cuda.device_count() * ranks_per_gpu()
    if local_rank >= most:
        share = f", for {ranks_per_gpu()} ranks each" if ranks_per_gpu() > 1 else ""
        raise ValueError(
            f"rank {rank} is number {local_rank} on its machine and that has {count} GPUs{share}; "
            f"start at most {most} ranks per machine, or let {local_rank // count + 1} share a GPU, which is slow "
            f"({RANKS_PER_GPU}={local_rank // count + 1})"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """What `torch.distributed.init_process_group` is to send with, for tensors of either kind of memory."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if ranks_per_gpu() == 1 else "cpu:gloo,cuda:gloo"


def passes_the_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether what a group's ranks send from GPU to GPU goes through the host's memory, for gloo carries it."""
    return device.type == "cuda" and group is not None and "cuda:gloo" in dist.get_backend_config(group)


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where a tensor of a rank on `device` lies as a message from one rank to another, for those who post it themselves."""
    return torch.device("cpu") if passes_the_host(group, device) else device
