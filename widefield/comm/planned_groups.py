"""Process groups that record messages and send none.

Other ranks are taken to have what this rank has.  So a sum of small real tensors is `size` times this rank's, a gathered one is
this rank's repeated, and what arrives from a peer is 1, which is how pipelines agree that shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from widefield.private_torch.dispatcher import disable_current_modes
from widefield.private_torch.fake_tensors import FakeTensor
from widefield.private_torch.process_groups import c10d_world

BACKEND = "widefield_planned"


_Group: Any = dist.ProcessGroup
"""(torch's stubs give other signatures than torch calls a group in Python with.)"""


class MessageRecorder(Protocol):
    """What is told of messages.  rank, ranks: of this process in the world that is planned."""

    rank: int
    ranks: int

    def message(self, kind: Any, tensors: Iterable[Tensor], ranks: tuple[int, ...], peer: int | None, *, control: bool) -> int:
        """A message begins; returns its number.  ranks: of its group.  peer: a global rank.  control: of small numbers."""

    def waited(self, number: int) -> None:
        """The program waits for a message."""


_recorders: list[MessageRecorder] = []
"""Who is told of messages; the last."""


class PlannedGroup(_Group):
    """A group of `size` ranks of which only this process is there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._members: tuple[int, ...] = ()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> Any:
        """torch asks a backend whether it sends several messages as one."""
        return self

    @property
    def group_name(self) -> str:
        return c10d_world.pg_names[self]

    pg_name = group_name

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks, in the group's order."""
        self._members = self._members or tuple(dist.get_process_group_ranks(self))
        return self._members

    def _posted(self, kind: str, tensors: Iterable[Tensor], peer: int | None = None, result: Any = None) -> dist.Work:
        tensors = list(tensors)
        recorder = _recorders[-1]
        other = None if peer is None else self.members[peer]
        control = peer is None and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        number = recorder.message(kind, tensors, self.members, other, control=control)
        return _Arrived(lambda: recorder.waited(number), tensors if result is None else result)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            _on_real(tensors, lambda tensor: tensor.mul_(self._size))
        return self._posted("all_reduce", tensors)

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._posted("barrier", [])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._posted("broadcast", tensors)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for parts, tensor in zip(gathered, tensors, strict=True):
            _on_real(parts, _copy_of(tensor))
        return self._posted("all_gather", tensors, result=gathered)

    def all_gather_single(self, gathered: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        self._fill_with_repeats(gathered, part)
        return self._posted("all_gather", [part], result=gathered)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, gathered: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        for whole, part in zip(gathered, parts, strict=True):
            self._fill_with_repeats(whole, part)
        return self._posted("all_gather", parts, result=gathered)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _fill_with_repeats(self, whole: Tensor, part: Tensor) -> None:
        _on_real([whole], lambda each: each.view(-1).copy_(part.reshape(-1).repeat(self._size)))

    def reduce_scatter(self, parts: list[Tensor], tensors: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._posted("reduce_scatter", [tensor for each in tensors for tensor in each], result=parts)

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self._posted("reduce_scatter", [whole], result=part)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, parts: list[Tensor], wholes: list[Tensor], opts: Any = None) -> dist.Work:
        return self._posted("reduce_scatter", wholes, result=parts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, received: Tensor, sent: Tensor, *_: Any) -> dist.Work:
        return self._posted("all_to_all", [sent], result=received)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._posted("send", tensors, dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        _on_real(tensors, lambda tensor: tensor.fill_(1))
        return self._posted("receive", tensors, src)


class _Arrived(dist.Work):
    """A message that is over at once.  waited: called where the program waits for it."""

    def __init__(self, waited: Callable[[], None], result: Any) -> None:
        super().__init__()
        self._waited, self._result = waited, result

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._waited()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        self._waited()
        future: Future = Future()
        future.set_result(self._result)
        return future


class _NoStore(dist.Store):
    """A store that nobody meets in."""


def _copy_of(value: Tensor) -> Callable[[Tensor], Any]:
    return lambda each: each.copy_(value)


def _on_real(tensors: Iterable[Tensor], change: Callable[[Tensor], Any]) -> None:
    """Change the tensors that have numbers."""
    with disable_current_modes(), torch.no_grad():
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                change(tensor)


@contextmanager
def planned_world(recorder: MessageRecorder) -> Iterator[None]:
    """Inside, torch.distributed is initialized with this process as the recorder's rank, alone.

    RuntimeError: it is initialized already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a step is planned with process groups of its own, and torch.distributed is initialized in this process; plan "
            "before it is, or in another process"
        )
    _recorders.append(recorder)
    try:
        if recorder.ranks > 1:
            _register()
            dist.init_process_group(BACKEND, rank=recorder.rank, world_size=recorder.ranks, store=_NoStore())
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _recorders.pop()


def _register() -> None:
    if BACKEND not in dist.Backend.backend_list:
        make = lambda store, rank, size, timeout: PlannedGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
