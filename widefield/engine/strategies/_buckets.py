"""How large are the messages that gradients travel in?  Measured where it is left open, as Horovod's autotuning does by trying.

A message of n bytes takes about a + b n seconds.  Small ones leave early in the backward and hide behind what is left of it;
each costs a.  So a bucket is as small as may be while a is a twentieth of its time, and there are four of them at least.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from widefield.engine.mesh import Mesh

LEAST_MIB, LATENCY_SHARE, BUCKETS_LEAST = 1.0, 0.05, 4
_SMALL, _TRIES = 2**14, 5


def bucket_mib(model: nn.Module, mesh: Mesh) -> tuple[float, list[str]]:
    """Size of a bucket in MiB, the same on every rank of `mesh`, and the reason where it was measured.

    Every rank calls it: where the plan leaves the size open, ranks send each other messages of two sizes.
    """
    if mesh.plan.bucket_mib is not None:
        return mesh.plan.bucket_mib, []
    total = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    large = min(max(total, 2 * _SMALL), 2**24)
    of_ranks = mesh.gather_objects([_seconds(size, mesh) for size in (_SMALL, large)])
    short, long = (max(times) for times in zip(*of_ranks, strict=True))
    per_byte = max(long - short, 1e-12) / (large - _SMALL)
    latency = max(short - per_byte * _SMALL, 0.0)
    chosen = chosen_mib(latency, per_byte, total)
    return chosen, [
        f"gradient.bucket_mib={chosen:g}: a message takes {latency * 1e3:.3g} ms and {per_byte * 2**20 * 1e3:.3g} ms per MiB "
        f"here, and gradients are {total / 2**20:.3g} MiB"
    ]


def chosen_mib(latency: float, per_byte: float, total: int) -> float:
    """MiB, a power of 2, for messages of `latency` + `per_byte` n seconds and gradients of `total` bytes."""
    enough = latency / (LATENCY_SHARE * per_byte) / 2**20
    most = max(LEAST_MIB, total / BUCKETS_LEAST / 2**20)
    return 2.0 ** round(math.log2(min(max(enough, LEAST_MIB), most)))


def _seconds(size: int, mesh: Mesh) -> float:
    """Of a sum of `size` bytes over the ranks that average gradients, in the middle of a few tries."""
    tensor = torch.zeros(size // 4, device=mesh.device)

    def once() -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor, group=mesh.data_group)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(_TRIES))
