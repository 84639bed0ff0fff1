"""Which gradients travel together, and how large are the messages?

The size is measured where it is left open, as Horovod's autotuning does by trying.  A message of n bytes takes about a + b n
seconds.  Small ones leave early in the backward and hide behind what is left of it; each costs a.  So a bucket is as small as
may be while a is a twentieth of its time, and there are four of them at least.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.private_torch.tensors import cdata, storage_use_count
from widefield.tiled.redistribute import is_dense

FIRST_BYTES = 2**20
"""Of the first bucket, which is to leave early; torch's DDP has the same."""
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


# ---------------------------------------------------------------------------------------------- buckets


@dataclass(frozen=True)
class Seen:
    """What a backward showed: parameters, by number, in the order in which they got gradients, and which were trained.

    is_static: whether each got its gradient at once, and not by parts of the backward.
    """

    order: tuple[int, ...]
    trained: tuple[int, ...]
    is_static: bool = True

    @classmethod
    def together(cls, of_passes: Sequence[Seen]) -> Seen:
        """Of several passes or ranks, as one: the order is the first one's."""
        order = dict.fromkeys(number for seen in of_passes for number in seen.order)
        trained = dict.fromkeys(number for seen in of_passes for number in seen.trained)
        return cls(tuple(order), tuple(trained), all(seen.is_static for seen in of_passes))


class Bucket:
    """Gradients of one dtype that travel together.  What torch's communication hooks for DDP ask of a bucket is here, too.

    parameters: with their numbers; they are held weakly.  waiting: how many of them have no gradient yet in a backward.
    """

    def __init__(self, number: int, parameters: Sequence[tuple[int, Tensor]], *, is_last: bool) -> None:
        self.number, self.members, self._is_last = number, [n for n, _ in parameters], is_last
        self._parameters = [weakref.ref(parameter) for _, parameter in parameters]
        self.work: Any = None
        self._kept: Tensor | None = None
        self._users = 0
        self.begin()

    def begin(self) -> None:
        """Before a backward."""
        self.waiting = len(self.members)

    def parameters(self) -> list[Tensor]:
        found = [parameter() for parameter in self._parameters]
        assert all(parameter is not None for parameter in found), "a model is looked at for new parameters in each forward"
        return found  # type: ignore[return-value]

    def fill(self, scale: float) -> None:
        """Take this rank's gradients, times `scale`, into memory that nobody else looks at."""
        parameters = self.parameters()
        self._flat = self._memory_for(parameters)
        self._views, start = [], 0
        for parameter in parameters:
            run, start = self._flat[start : start + parameter.numel()], start + parameter.numel()
            view = run.as_strided(parameter.size(), parameter.stride()) if is_dense(parameter) else run.view(parameter.size())
            self._views.append(view)
            if parameter.grad is None:
                view.zero_()
                continue
            torch.mul(parameter.grad, scale, out=view)
            parameter.grad = view

    def _memory_for(self, parameters: Sequence[Tensor]) -> Tensor:
        """The last backward's, where its gradients are gone; else new memory, whose pages cost a CPU more than the sum."""
        first, memory = parameters[0], self._kept
        like = (sum(p.numel() for p in parameters), first.dtype, first.device)
        if memory is None or (len(memory), memory.dtype, memory.device) != like or _users_of(memory) > self._users:
            memory = torch.empty(like[0], dtype=like[1], device=like[2])
            self._users = _users_of(memory)
        self._kept = memory if first.device.type == "cpu" else None  # a GPU's allocator keeps it, for others too
        return memory

    def finish(self) -> None:
        """Wait for the message."""
        if self.work is None:
            return
        if isinstance(self.work, torch.futures.Future):
            result = self.work.wait()
            result = result[0] if isinstance(result, list) else result
            if result.data_ptr() != self._flat.data_ptr():
                self._flat.copy_(result.view_as(self._flat))
        else:
            self.work.wait()
        self.work = None

    def take(self) -> bool:
        """Wait for the message; whether some parameter has no gradient on this rank."""
        self.finish()
        is_missing = any(parameter.grad is None for parameter in self.parameters())
        if not is_missing:
            self._forget()
        return is_missing

    def settle(self, counts: Sequence[int]) -> None:
        """counts: on how many ranks each parameter of the model has a gradient."""
        for number, parameter, view in zip(self.members, self.parameters(), self._views, strict=False):
            if parameter.grad is None and counts[number]:
                parameter.grad = view
        self._forget()

    def _forget(self) -> None:
        """The memory is the gradients' from now on, as long as there are any."""
        self._flat, self._views = torch.empty(0), []

    # what torch's hooks ask

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def set_buffer(self, buffer: Tensor) -> None:
        self._flat.copy_(buffer)


def _users_of(tensor: Tensor) -> int:
    """How many tensors show this memory, views too, and one more for being asked."""
    return storage_use_count(cdata(tensor.untyped_storage()))


@dataclass(eq=False)
class BucketLayout:
    """Buckets in the order of sending, and `late`: parameters in none of them, which got no gradient so far.

    is_static: whether a bucket may leave as soon as autograd has added to all of its gradients once.
    """

    buckets: list[Bucket]
    late: list[int]
    where: dict[int, Bucket]
    is_static: bool = True


def late_of(seen: Seen, trained: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the parameters that are trained now, those to be sent, in order, and those that are not expected to be.

    Those that were frozen when `seen` was seen are expected, last.
    """
    now, then, reached = set(trained), set(seen.trained), set(seen.order)
    fresh = [number for number in trained[::-1] if number not in then and number not in reached]
    order = [number for number in seen.order if number in now]
    return order + fresh, [number for number in trained if number in then and number not in reached]


def laid_out(
    parameters: Sequence[tuple[int, Tensor]], late: list[int], bucket_bytes: int, *, is_static: bool = True
) -> BucketLayout:
    """Parameters of one dtype and device together, in order, up to so many bytes; the first bucket is small."""
    runs: list[list[tuple[int, Tensor]]] = []
    open_runs: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        run = open_runs.get(kind)
        most = min(FIRST_BYTES, bucket_bytes) if run is not None and run is runs[0] else bucket_bytes
        if run is None or sum(p.nbytes for _, p in run) + parameter.nbytes > most:
            run = open_runs[kind] = []
            runs.append(run)
        run.append((number, parameter))
    buckets = [Bucket(number, run, is_last=number == len(runs) - 1) for number, run in enumerate(runs)]
    return BucketLayout(buckets, late, {member: bucket for bucket in buckets for member in bucket.members}, is_static)
