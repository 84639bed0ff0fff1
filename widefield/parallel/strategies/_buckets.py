"""Which gradients are sent in one bucket, and how large is a bucket?

Where the plan leaves the size open it is measured.  A message of n bytes takes about a + b n seconds.  Small buckets are sent
early and overlap with the rest of the backward, but each costs the latency a.  So a bucket is the smallest whose latency is
a twentieth of its time, and there are at least four.
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
from widefield.private_torch.fake_tensors import runs_on_gpu
from widefield.private_torch.tensors import cdata, storage_use_count
from widefield.tiled.redistribute import is_dense

FIRST_BYTES = 2**20
"""The first bucket's size: small, so that it is sent early; torch's DDP has the same."""
LEAST_MIB, LATENCY_SHARE, BUCKETS_LEAST = 1.0, 0.05, 4
_SMALL, _TRIES = 2**14, 5


def bucket_mib(model: nn.Module, mesh: Mesh) -> tuple[float, list[str]]:
    """The size of a bucket in MiB, the same on every rank of `mesh`, and the reason where it was measured.

    Every rank calls it: where the plan leaves the size open, messages of two sizes are timed.
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
    """The bucket size in MiB, a power of 2, where n bytes take `latency` + `per_byte` n seconds and gradients `total` bytes."""
    enough = latency / (LATENCY_SHARE * per_byte) / 2**20
    most = max(LEAST_MIB, total / BUCKETS_LEAST / 2**20)
    return 2.0 ** round(math.log2(min(max(enough, LEAST_MIB), most)))


def _seconds(size: int, mesh: Mesh) -> float:
    """The median time of an all-reduce of `size` bytes over the ranks that average gradients."""
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
class GradientOrder:
    """The parameters, by number, in the order in which a backward gave them gradients.

    trained: those with requires_grad.  is_static: whether each got its gradient in one accumulation.
    """

    order: tuple[int, ...]
    trained: tuple[int, ...]
    is_static: bool = True

    @classmethod
    def merge(cls, of_passes: Sequence[GradientOrder]) -> GradientOrder:
        """Merge the orders of several passes or ranks: that of the first, then parameters that only later ones have."""
        order = dict.fromkeys(number for gradient_order in of_passes for number in gradient_order.order)
        trained = dict.fromkeys(number for gradient_order in of_passes for number in gradient_order.trained)
        return cls(tuple(order), tuple(trained), all(gradient_order.is_static for gradient_order in of_passes))


class Bucket:
    """Gradients of one dtype that are sent in one message.  Has the methods of torch's `GradBucket`, for DDP's hooks.

    parameters: with their numbers; held by weak references.  waiting: how many have no gradient yet in this backward.
    """

    def __init__(self, number: int, parameters: Sequence[tuple[int, Tensor]], *, is_last: bool) -> None:
        self.number, self.members, self._is_last = number, [n for n, _ in parameters], is_last
        self._parameters = [weakref.ref(parameter) for _, parameter in parameters]
        self.work: Any = None
        self._memory: Tensor | None = None
        self._users = 0
        self.begin()

    def begin(self) -> None:
        """Before a backward."""
        self.waiting = len(self.members)

    def parameters(self) -> list[Tensor]:
        found = [parameter() for parameter in self._parameters]
        assert all(parameter is not None for parameter in found), "a parameter of this bucket was freed"
        return found  # type: ignore[return-value]

    def fill(self, scale: float) -> None:
        """Copy this rank's gradients, times `scale`, into the flat buffer, and make `grad` views of it."""
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
        """The last backward's buffer if its gradients are freed, else new memory, whose pages cost a CPU more than the sum."""
        first, memory = parameters[0], self._memory
        like = (sum(p.numel() for p in parameters), first.dtype, first.device)
        if memory is None or (len(memory), memory.dtype, memory.device) != like or _users_of(memory) > self._users:
            memory = torch.empty(like[0], dtype=like[1], device=like[2])
            self._users = _users_of(memory)
        self._memory = None if runs_on_gpu(first) else memory  # a GPU's allocator keeps it, for others too
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
        """Wait for the message; returns whether some parameter has no gradient on this rank."""
        self.finish()
        is_missing = any(parameter.grad is None for parameter in self.parameters())
        if not is_missing:
            self._forget()
        return is_missing

    def fill_missing(self, counts: Sequence[int]) -> None:
        """Give parameters without a gradient on this rank the averaged one, where another rank has a gradient.

        counts: on how many ranks each parameter of the model has a gradient.
        """
        for number, parameter, view in zip(self.members, self.parameters(), self._views, strict=False):
            if parameter.grad is None and counts[number]:
                parameter.grad = view
        self._forget()

    def _forget(self) -> None:
        """Drop the buffer; from now on only the gradients, its views, keep it alive."""
        self._flat, self._views = torch.empty(0), []

    # ------------------------------------------------------------------------------------------ torch's GradBucket

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, dims in the order in which they lie there: PowerSGD makes a matrix of each without a copy."""
        return [view.permute(_order_in_memory(view)) for view in self._views]

    def set_buffer(self, buffer: Tensor) -> None:
        self._flat.copy_(buffer)


def _order_in_memory(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)


def _users_of(tensor: Tensor) -> int:
    """How many tensors use this storage, views too, plus one for the handle made here."""
    return storage_use_count(cdata(tensor.untyped_storage()))


@dataclass(eq=False)
class BucketLayout:
    """Buckets in the order of sending.  late: parameters in no bucket, because they have had no gradient so far.

    is_static: whether a bucket may be sent as soon as autograd has added once to each of its gradients.
    """

    buckets: list[Bucket]
    late: list[int]
    where: dict[int, Bucket]
    is_static: bool = True


def expected_order(gradient_order: GradientOrder, trained: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the parameters trained now: those expected to get gradients, in order, and those that are not.

    Those that were frozen when `gradient_order` was recorded are expected, last.
    """
    now, then, reached = set(trained), set(gradient_order.trained), set(gradient_order.order)
    fresh = [number for number in trained[::-1] if number not in then and number not in reached]
    order = [number for number in gradient_order.order if number in now]
    return order + fresh, [number for number in trained if number in then and number not in reached]


def make_buckets(
    parameters: Sequence[tuple[int, Tensor]], late: list[int], bucket_bytes: int, *, is_static: bool = True
) -> BucketLayout:
    """Group parameters of one dtype and device, in order, into buckets of up to `bucket_bytes`; the first bucket is small."""
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
