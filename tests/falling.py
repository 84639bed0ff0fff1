"""Runs the command on ranks, one of which something befalls: `fall(2, arguments, plant, folder=...)`.

Ranks are forked from a process that has torch loaded, as in ranks.py, and end as they end in earnest: with a status and with
what they said.  Nobody ends the others for them, as torchrun would.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ranks import PRELOADED

FELL = "something befalls this rank at"
Plant = Callable[[int], None]


@dataclass(frozen=True)
class Ended:
    """status: as the shell has it, -9 for a kill.  seconds: after the first rank fell; after the start, where none did.

    time: of the end, as time.time() has it.
    """

    status: int
    said: str
    seconds: float
    time: float = 0.0


def fall(size: int, arguments: list[Any], plant: Plant, *, folder: Path, limit_seconds: float = 90.0) -> list[Ended]:
    """`widefield` with `arguments` on `size` ranks, each of which calls `plant(rank)` first; how each ended, in rank order.

    Ranks that have not ended `limit_seconds` after the start are killed: their status is -9 and they took that long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "widefield.run", "widefield.inference"])
    warm = context.Process(target=int)  # the fork server loads torch before it serves
    warm.start()
    warm.join()
    folder.mkdir(parents=True, exist_ok=True)
    given = (size, _free_port(), [str(word) for word in arguments], plant, str(folder))
    began = time.time()
    processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(size)]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    while len(ends) < size and time.time() < began + limit_seconds:
        ends |= {rank: time.time() for rank, one in enumerate(processes) if rank not in ends and not one.is_alive()}
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.join()
    said = [(folder / f"said{rank}").read_text() for rank in range(size)]
    fell = min([float(when) for text in said for when in re.findall(rf"{FELL} ([\d.]+)", text)], default=began)
    last = time.time()
    times = [ends.get(rank, last) for rank in range(size)]
    return [Ended(int(processes[r].exitcode or 0), said[r], times[r] - fell, times[r]) for r in range(size)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _rank(rank: int, size: int, port: int, arguments: list[str], plant: Plant, folder: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="")
    output = os.open(Path(folder) / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers; a child of a fork server would use one too
    import torch

    from widefield.cli import main

    torch.set_num_threads(1)
    plant(rank)
    os._exit(main(arguments))


# ---------------------------------------------------------------------------------------------- what may befall a rank


def raising(who: int, place: str, name: str, error: Exception, after: int, rank: int) -> None:
    """On rank `who`, the method `name` of the class at `place` (module:class) raises, once it has run `after` times."""
    if rank != who:
        return
    import importlib

    module, _, kind = place.partition(":")
    owner, left = getattr(importlib.import_module(module), kind), [after]
    method = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return method(*args, **kwargs)
        _note()
        raise error

    setattr(owner, name, planted)


def in_backward(who: int, error: Exception, after: int, rank: int) -> None:
    """On rank `who`, the backward of the loss raises in its middle, in the pass after so many; trial passes count."""
    if rank != who:
        return
    from widefield.tasks.segmentation import Segmentation

    original, left = Segmentation.loss_sum, [after]

    def planted(self: Any, output: Any, target: Any) -> Any:
        left[0] -= output.requires_grad  # an evaluation has no backward
        if left[0] < 0:
            nodes = [output.grad_fn]
            for _ in range(20):  # twenty operations before the loss
                nodes = [node for parent in nodes for node, _ in parent.next_functions if node is not None][:1] or nodes
            nodes[0].register_prehook(partial(_raise, error))
        return original(self, output, target)

    Segmentation.loss_sum = planted  # type: ignore[method-assign]


def killed(who: int, seconds: float, rank: int) -> None:
    """SIGKILL to rank `who` so many seconds after its start."""
    if rank == who:
        signal.signal(signal.SIGALRM, lambda *_: (_note(), os.kill(os.getpid(), signal.SIGKILL)))
        signal.setitimer(signal.ITIMER_REAL, seconds)


def away(who: int, other: int, rank: int) -> None:
    """Rank `who` raises in its third step, in which rank `other` sleeps; a rank is ended that takes a second to come back."""
    from widefield.comm import failure
    from widefield.training.loop import Learner

    failure.LEAVE_SECONDS = 1.0
    raising(who, "widefield.training.loop:Learner", "learn", RuntimeError("planted"), 2, rank)
    if rank == other:
        learn, left = Learner.learn, [2]

        def sleeping(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                time.sleep(60)
            return learn(*args, **kwargs)

        Learner.learn = sleeping  # type: ignore[method-assign]


def worker_killed(who: int, rank: int) -> None:
    """On rank `who`, a loader worker that reads its third batch is killed, as for lack of memory."""
    if rank != who:
        return
    from widefield.data.loader import SampleReader

    read, left, parent = SampleReader.__getitems__, [2], os.getpid()

    def planted(self: Any, keys: Any) -> Any:
        left[0] -= os.getpid() != parent
        if left[0] < 0:
            _note()
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, keys)

    SampleReader.__getitems__ = planted  # type: ignore[method-assign]


def asking(text: str, rank: int) -> None:
    """The faults that WIDEFIELD_FAULTS asks for."""
    os.environ["WIDEFIELD_FAULTS"] = text


def nothing(rank: int) -> None:
    """All is well."""


def _raise(error: Exception, *_: Any) -> None:
    _note()
    raise error


def _note() -> None:
    print(FELL, time.time(), flush=True)
