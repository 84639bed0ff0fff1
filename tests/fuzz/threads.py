"""Ranks as threads of one process that run one at a time and hand tensors to each other in memory.

A rank runs until it has to wait for another; then the next that can go on does.  So there are no races, a program runs the same
way each time, one that waits for ever is found out at once, and ranks that call different collectives are told so.  Random
states and counts of writes are swapped with the ranks, since there is one per process.

    ranks = Ranks(2)
    ranks.run(body)          # body(rank) on each; a list of what they return
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg as torch_threads

from widefield.tiled import view_writeback

BACKEND = "one_at_a_time"


class Stuck(RuntimeError):
    """A rank waits for what will never come."""


class Mismatch(RuntimeError):
    """Ranks called different collectives where one was expected of all."""


# ---------------------------------------------------------------------------------------------- whose turn it is


class Turns:
    """Lets one of `size` threads run at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = [threading.Event() for _ in range(size)]
        self.begin()

    def begin(self) -> None:
        self.waits: list[Callable[[], bool] | None] = [None] * self.size
        self.done = [False] * self.size
        self.is_broken = False

    def wait_until(self, rank: int, holds: Callable[[], bool]) -> None:
        """Let others run until `holds()`; Stuck where nobody can go on, or another rank has failed."""
        if holds():
            return
        self.waits[rank] = holds
        own = _state_of_process()
        self._call_next(rank)
        self.calls[rank].wait()
        self.calls[rank].clear()
        _restore(own)
        self.waits[rank] = None
        if not holds():
            raise Stuck(f"rank {rank} waits for a message that no rank will send")

    def finish(self, rank: int) -> None:
        self.done[rank] = True
        self._call_next(rank)

    def _call_next(self, rank: int) -> None:
        """Wake a rank that can go on; where none can, the ranks that wait, one after another, to fail."""
        others = [(rank + step) % self.size for step in range(1, self.size + 1)]
        alive = [other for other in others if not self.done[other]]
        ready = [other for other in alive if (holds := self.waits[other]) is None or holds()]
        for other in (ready or alive)[:1]:
            self.is_broken = self.is_broken or not ready
            self.calls[other].set()


def _state_of_process() -> tuple:
    """What there is one of in each process, and so for each rank."""
    return torch.get_rng_state(), random.getstate(), view_writeback._UNSEEN[0]


def _restore(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    view_writeback._UNSEEN[0] = state[2]


# ---------------------------------------------------------------------------------------------- collectives


@dataclass
class Call:
    """One collective of a group: what each rank brought."""

    kind: str
    given: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False
    problem: str | None = None


class Work:
    def __init__(self, group: Group, is_done: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> None:
        self.group, self.is_done, self.finish = group, is_done, finish
        self.is_over = False

    def wait(self, timeout: Any = None) -> bool:
        if not self.is_over:
            self.group.turns.wait_until(self.group.thread, self.is_done)
            self.finish()
            self.is_over = True
        return True

    def is_completed(self) -> bool:
        return self.is_done()

    def result(self) -> list[Tensor]:
        return []


class Board:
    """What the ranks of a pool share: calls and messages by group."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], Call] = {}
        self.messages: dict[tuple[str, int, int, int], Tensor] = {}
        self.groups: list[Group] = []

    def clear(self) -> None:
        self.calls.clear()
        self.messages.clear()
        for group in self.groups:
            group.begin()


REDUCED: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0),
    dist.ReduceOp.AVG: lambda parts: parts.sum(0) / len(parts),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
    dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    dist.ReduceOp.BAND: lambda parts: reduce(torch.bitwise_and, parts),
    dist.ReduceOp.BOR: lambda parts: reduce(torch.bitwise_or, parts),
    dist.ReduceOp.BXOR: lambda parts: reduce(torch.bitwise_xor, parts),
}

_HERE = threading.local()
"""Of a rank's thread: `rank`, `board`, `turns`."""


class Group(dist.ProcessGroup):
    """A process group of ranks that are threads."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.place, self.ranks = rank, size
        self.thread, self.board, self.turns = _HERE.rank, _HERE.board, _HERE.turns
        self.board.groups.append(self)
        self.begin()

    def begin(self) -> None:
        self.count = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=False)

    def _call(self, kind: str, tensors: Any, carry_out: Callable[[dict[int, Any]], None]) -> Work:
        """Join the group's next collective; whoever comes last carries it out."""
        key = self.group_name, self.count
        self.count += 1
        call = self.board.calls.setdefault(key, Call(kind))
        if call.kind != kind:
            call.problem = f"rank {self.place} of group {key[0]} calls {kind} where others call {call.kind}"
        call.given[self.place] = tensors
        if len(call.given) == self.ranks:
            if call.problem is None:
                with torch.no_grad():
                    carry_out(call.given)
            call.is_done = True
            del self.board.calls[key]
        return Work(self, lambda: call.is_done, lambda: _raise(call.problem))

    # what torch.distributed calls

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        def carry_out(given: dict[int, list[Tensor]]) -> None:
            total = self._reduced([given[rank][0].detach() for rank in sorted(given)], opts)
            for brought in given.values():
                brought[0].detach().copy_(total)

        return self._call(f"all-reduce {_like(tensors[0])}", tensors, carry_out)

    def _reduced(self, parts: list[Tensor], opts: Any) -> Tensor:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        stacked = torch.stack(parts)
        for known, reduced in REDUCED.items():
            if op == known:
                return reduced(stacked)
        assert op.op == dist.ReduceOp.PREMUL_SUM, f"{op} is not carried out here"
        return stacked.sum(0) * op.factor

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def carry_out(given: dict[int, list[Tensor]]) -> None:
            for rank, brought in given.items():
                if rank != root:
                    brought[0].detach().copy_(given[root][0].detach())

        return self._call(f"broadcast from {root} {_like(tensors[0])}", tensors, carry_out)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        def carry_out(given: dict[int, Any]) -> None:
            for places, _ in given.values():
                for rank, place in enumerate(places[0]):
                    place.detach().copy_(given[rank][1][0].detach())

        return self._call(f"all-gather {_like(inputs[0])}", (outputs, inputs), carry_out)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self.allgather([list(output.detach().chunk(self.ranks))], [given])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def carry_out(given: dict[int, Any]) -> None:
            for rank, place in enumerate(given[root][0][0]):
                place.detach().copy_(given[rank][1][0].detach())

        return self._call(f"gather to {root} {_like(inputs[0])}", (outputs, inputs), carry_out)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        def carry_out(brought: dict[int, Any]) -> None:
            total = self._reduced([brought[rank][1].detach() for rank in sorted(brought)], opts)
            for rank, part in enumerate(total.chunk(self.ranks)):
                brought[rank][0].detach().copy_(part.view(brought[rank][0].shape))

        return self._call(f"reduce-scatter {_like(given)}", (output, given), carry_out)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Work:
        return self._call("barrier", None, lambda given: None)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        number = self.sent.get(to, 0)
        self.sent[to] = number + 1
        self.board.messages[self.group_name, self.place, to, number] = tensors[0].detach().clone()
        return Work(self, lambda: True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        number = self.received.get(source, 0)
        self.received[source] = number + 1
        key = self.group_name, source, self.place, number

        def take() -> None:
            message = self.board.messages.pop(key)
            if message.shape != tensors[0].shape or message.dtype != tensors[0].dtype:
                raise Mismatch(f"rank {self.place} expects {_like(tensors[0])} and rank {source} sent {_like(message)}")
            tensors[0].detach().copy_(message)

        return Work(self, lambda: key in self.board.messages, take)


def _like(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise Mismatch(problem)


def _made(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(rank, size)


dist.Backend.register_backend(BACKEND, _made, devices=["cpu"])


@contextmanager
def installed() -> Iterator[None]:
    """Inside, threads have worlds of process groups of their own, and every new group is one of threads."""
    new_group, barrier = dist.new_group, distributed_c10d._store_based_barrier

    def without_backend(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)

    stacks = mock.patch.object(fake_tensor, "traceback", SimpleNamespace(extract_stack=list, format_list=traceback.format_list))
    stacks.start()  # which every trace of a model would write down, a tenth of the time
    torch_threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    dist.new_group = distributed_c10d.new_group = without_backend
    distributed_c10d._store_based_barrier = lambda *_, **__: None
    try:
        yield
    finally:
        stacks.stop()
        dist.new_group = distributed_c10d.new_group = new_group
        distributed_c10d._store_based_barrier = barrier
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch_threads._uninstall_threaded_pg()


# ---------------------------------------------------------------------------------------------- a pool of ranks


@dataclass
class Failed:
    """What went wrong on a rank."""

    error: BaseException
    text: str


class Ranks:
    """`size` ranks that stay: their process groups are made once.  Use them inside of `installed()`."""

    def __init__(self, size: int) -> None:
        self.size, self.board, self.turns = size, Board(), Turns(size)
        self.work: list[Callable[[int], Any] | None] = [None] * size
        self.answers: list[Any] = [None] * size
        self.is_over = threading.Semaphore(0)
        self.starts = [threading.Semaphore(0) for _ in range(size)]
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"rank {rank} of {size}").start()

    def _serve(self, rank: int) -> None:
        _HERE.rank, _HERE.board, _HERE.turns = rank, self.board, self.turns
        torch.set_num_threads(1)
        while True:
            self.starts[rank].acquire()
            self.turns.calls[rank].wait()
            self.turns.calls[rank].clear()
            try:
                if not dist.is_initialized():
                    dist.init_process_group(BACKEND, rank=rank, world_size=self.size, store=dist.HashStore())
                assert self.work[rank] is not None
                self.answers[rank] = self.work[rank](rank)
            except BaseException as error:
                self.answers[rank] = Failed(error, traceback.format_exc())
            self.turns.finish(rank)
            self.is_over.release()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """`body(rank)` on every rank, each from the same random state; what each returns, a Failed where it raised."""
        first = _state_of_process()
        self.turns.begin()
        self.board.clear()
        for rank in range(self.size):
            self.work[rank] = self._begun_at(body, first)
            self.starts[rank].release()
        self.turns.calls[0].set()
        for _ in range(self.size):
            self.is_over.acquire()
        _restore(first)
        for event in self.turns.calls:
            event.clear()
        return list(self.answers)

    @staticmethod
    def _begun_at(body: Callable[[int], Any], first: tuple) -> Callable[[int], Any]:
        def begin(rank: int) -> Any:
            _restore(first)
            return body(rank)

        return begin
