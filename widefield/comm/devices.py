"""Which device does a rank compute on, and which backend sends its messages?

A rank has a GPU of its own and sends with NCCL; on a machine without GPUs it computes on the CPU and sends with gloo.
NCCL allows one rank per GPU.  To let ranks share GPUs, for example to try a plan of four ranks on one GPU, set the environment
variable that RANKS_PER_GPU names.  Then gloo sends all messages through the host's memory, which is much slower.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

BINDS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
"""Environment variables of a launcher that shows each rank a GPU of its own, as the only one."""
RANKS_PER_GPU = "WIDEFIELD_RANKS_PER_GPU"
"""Environment variable: how many ranks may share a GPU; 1 where it is not set."""


def ranks_per_gpu() -> int:
    """How many ranks may share a GPU.  ValueError: the environment variable is not a whole number of at least 1."""
    setting = os.environ.get(RANKS_PER_GPU, "1").strip()
    if not (setting.isascii() and setting.isdigit() and int(setting) > 0):
        raise ValueError(f"{RANKS_PER_GPU}={setting!r} is no number of ranks; set it to 1 or more, or leave it out")
    return int(setting)


def device_of(rank: int, local_rank: int) -> torch.device:
    """The GPU of the rank that is number `local_rank` on its machine, or the CPU where there is no GPU.

    Makes it this process's current GPU.  Ranks that share GPUs are assigned round-robin.  Where the launcher shows each rank
    one GPU alone, it is that one; that no two ranks have the same is seen when they meet (roll_call.py).
    ValueError: the machine has more ranks than GPUs x ranks_per_gpu().
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, most = torch.cuda.device_count(), torch.cuda.device_count() * ranks_per_gpu()
    if count == 1 and any(os.environ.get(name) for name in BINDS):
        local_rank = 0
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


def gpu_of(device: torch.device) -> str | None:
    """The identity of a GPU, the same for all processes that see it; None of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def backward_in_this_thread(device: torch.device) -> None:
    """Have backward passes of a GPU run in the thread that calls them, as the CPU's do: all ranks keep one order.

    A backward runs the node first that was made last, by numbers that each thread counts for itself.  In a GPU's thread, the
    nodes of a gradient that is differentiated again would get numbers of that thread, and come after nodes that FSDP2 takes
    for the last to read a weight; and of several roots it runs one before it knows of the next, which differs from rank to
    rank, and with it the order of their messages.
    """
    if device.type == "cuda":
        torch.autograd.set_multithreading_enabled(False)


def backend_for(device: torch.device) -> str:
    """The `backend` argument of `torch.distributed.init_process_group`: one backend for CPU tensors, one for the GPU's."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if ranks_per_gpu() == 1 else "gloo"  # which takes tensors of both


def passes_the_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the group's messages between GPUs go through the host's memory, because gloo sends them."""
    return device.type == "cuda" and group is not None and "cuda:gloo" in dist.get_backend_config(group)


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device on which a point-to-point message must be when torch, and not `point_to_point`, posts it."""
    return torch.device("cpu") if passes_the_host(group, device) else device
