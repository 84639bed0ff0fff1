"""How long do messages take between the ranks that there are?  Every rank runs the same messages in the same order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.collectives import all_gather_single, reduce_scatter_single
from widefield.comm.point_to_point import exchange

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
"""Those that the planner prices; `halo` may be asked for too."""
SECONDS_EACH, REPEATS = 0.3, 5
"""For each kind and size: for how long, and how many between two looks at the clock."""
SMALL_NUMBERS = 128
"""That ranks sum when they meet, as those of a batch norm do.  (Of one number gloo sends half as many messages.)"""


def message_seconds(
    sizes: Sequence[int], *, group: dist.ProcessGroup, device: torch.device, kinds: Sequence[str] = KINDS
) -> list[tuple[str, int, float]]:
    """(kind, bytes of this rank's input, seconds) of each kind of message at each size, as this rank sees it.

    sizes: in bytes; rounded up to a number for every rank.  An all_gather's input is a rank's part, so that of `size` bytes is
    measured at size / ranks.  A send goes to rank 0 from rank 1, or the other way, in turn; a round trip counts as two.
    A halo goes from each rank to both of its neighbours at the same time, that many bytes to each; the outer ranks have one.
    Seconds are the mean of all but the 5 % fastest and slowest.  A step waits for many messages one after the other, so their
    mean is what adds up, and that of small ones may be thrice their median: a thread that waits is woken when there is a core.
    """
    found = []
    for kind in kinds:
        for size in sizes:
            numbers = -(-size // (4 * group.size())) * group.size()
            send, input_bytes = _message(kind, numbers, group, device)
            found.append((kind, input_bytes, _timed(send, group, device) / (2 if kind == "send" else 1)))
    return found


def seconds_of_meetings(
    compute: Callable[[], None], times: Sequence[int], *, group: dist.ProcessGroup, rounds: int = 200
) -> list[tuple[float, float]]:
    """What ranks of a CPU wait for each other where each calls `compute` so many times before a small sum over all of them.

    For each of `times`: seconds of computing, by the thread's own clock, and by how much a round is longer; means over
    the rounds and the ranks.
    """
    numbers, found = torch.ones(SMALL_NUMBERS), []
    for each in times:
        dist.barrier(group=group)
        began, computed = time.perf_counter(), 0.0
        for _ in range(rounds):
            before = time.thread_time()
            for _ in range(each):
                compute()
            computed += time.thread_time() - before
            _ended(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True))
        seconds = torch.tensor([computed, time.perf_counter() - began - computed], dtype=torch.float64)
        dist.all_reduce(seconds, group=group)
        ran, waited = (seconds / (group.size() * rounds)).tolist()
        found.append((ran, waited))
    return found


def cpu_share_of_sums(size: int, *, group: dist.ProcessGroup, rounds: int = 50) -> float:
    """Of the seconds of a sum of `size` bytes over ranks of a CPU, those that other threads of a rank than this one compute.

    The mean over the ranks: 1 where a message keeps a core busy as long as it is under way.
    """
    numbers = torch.ones(size // 4)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    began, all_threads, own = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(rounds):
        _ended(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True))
    busy = time.process_time() - all_threads - (time.thread_time() - own)
    share = torch.tensor(busy / (time.perf_counter() - began), dtype=torch.float64)
    dist.all_reduce(share, group=group)
    return float(share) / group.size()


def _message(kind: str, numbers: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Callable[[], None], int]:
    """A function that sends one message and waits for it, and the bytes of its input."""
    whole, part = torch.ones(numbers, device=device), torch.ones(numbers // group.size(), device=device)
    if kind == "all_reduce":
        return lambda: _ended(dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group, async_op=True)), whole.nbytes
    if kind == "all_gather":
        return lambda: _ended(all_gather_single(whole, part, group, async_op=True)), part.nbytes
    if kind == "reduce_scatter":
        return lambda: _ended(reduce_scatter_single(part, whole, group, async_op=True)), whole.nbytes
    if kind == "halo":
        halos = {peer: torch.empty_like(whole) for peer in (group.rank() - 1, group.rank() + 1) if 0 <= peer < group.size()}
        return lambda: _exchanged(whole, halos, group), whole.nbytes
    return lambda: _there_and_back(whole, group), whole.nbytes


def _ended(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _exchanged(tile: Tensor, halos: dict[int, Tensor], group: dist.ProcessGroup) -> None:
    for work in exchange(dict.fromkeys(halos, tile), halos, group):
        work.wait()


def _there_and_back(tensor: Tensor, group: dist.ProcessGroup) -> None:
    rank = group.rank()
    if rank == 0:
        dist.send(tensor, group=group, group_dst=1)
        dist.recv(tensor, group=group, group_src=1)
    elif rank == 1:
        dist.recv(tensor, group=group, group_src=0)
        dist.send(tensor, group=group, group_dst=0)


def _timed(send: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of one; every rank repeats it for as long as rank 0 finds right."""
    began, seconds = time.perf_counter(), []
    more = torch.ones(1, device=device)
    dist.barrier(group=group)
    _once(send, device)
    while more.item():
        seconds += [_once(send, device) for _ in range(REPEATS)]
        more.fill_(time.perf_counter() - began < SECONDS_EACH)
        dist.broadcast(more, group_src=0, group=group)
    seconds.sort()
    ends = len(seconds) // 20
    return statistics.mean(seconds[ends : len(seconds) - ends])


def _once(send: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    send()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
