"""Which rank is missing when a step does not end?  Every rank reports its progress; rank 0 names the ranks that are behind.

Every few seconds a thread on each rank writes to the rendezvous store: how many steps are done, how many collectives its groups
have begun, and the line that the main thread is at.  It has a connection of its own, so it works while every collective
hangs.  Nothing is stopped: the step ends once the late rank comes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import CodeType, FrameType

import torch
import torch.distributed as dist

from widefield.comm.keepalive import asking_whether_alive
from widefield.comm.mesh import Mesh
from widefield.private_torch.process_groups import get_default_store, sequence_number

_FLAG = "some rank's step does not end"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_WAITING = (
    os.path.join(TORCH, "distributed"), os.path.join(TORCH, "autograd", "graph.py"),
    *(os.path.join(_PACKAGE, "comm", name) for name in ("halo.py", "mesh.py", "point_to_point.py")),
    os.path.join(_PACKAGE, "tiled", "sync_batch_norm.py"),
)  # fmt: skip
"""Files in which the main thread is while it waits for messages, in the forward or the backward pass."""


@dataclass(frozen=True)
class Stand:
    """A rank's last report: steps done, collectives begun, and the line of its main thread.

    beat: the number of reports so far; where it stays the same, the process does not run.
    waits: whether the main thread waits for a message.
    """

    beat: int
    step: int
    begun: int
    place: str
    waits: bool


class StallWatch:
    """Watches the steps of a training run from a thread; every rank runs the steps in `with StallWatch(...):`.

    seconds: rank 0 warns when a step takes longer than this, and longer than five times the longest step so far.
    at: gives the number of steps done, and when (time.perf_counter) the current step began; None between steps.
    warn: called on rank 0 with the sentence, from the thread.
    """

    def __init__(
        self, mesh: Mesh, *, seconds: float, at: Callable[[], tuple[int, float | None]], warn: Callable[[str], None]
    ) -> None:
        self._mesh, self._seconds, self._at, self._warn = mesh, seconds, at, warn
        with asking_whether_alive():
            self._store = dist.PrefixStore("widefield/stall", get_default_store().clone())
        self._groups = [group for group in {mesh.group, mesh.data_group, mesh.statistics_group} if group is not None]
        self._begun = self._collectives()
        """Collectives begun before the watch; subtracted, since two ranks may have sent each other messages before."""
        self._main, self._over = threading.main_thread().ident, threading.Event()
        self._beat, self._longest, self._said, self._flagged = 0, 0.0, 0.0, False
        self._before: dict[int, int] = {}
        """Each rank's beat when a late step was first seen, and rank 0's own under -1."""
        self._thread = threading.Thread(target=self._watch, name="widefield stall watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(10.0)  # it is a daemon; a store that is gone may keep it longer

    def _watch(self) -> None:
        step, last = -1, 0.0
        while not self._over.wait(min(5.0, self._seconds / 10)):
            done, since = self._at()
            taken = 0.0 if since is None else time.perf_counter() - since
            if done != step:
                self._longest = max(self._longest, last)
                step, last, self._said, self._before = done, 0.0, 0.0, {}
            last = max(last, taken)
            try:
                self._look(done, taken)
            except RuntimeError:
                return  # the process that serves the store has ended; the launcher says why

    def _look(self, step: int, taken: float) -> None:
        """Report this rank's progress; on rank 0, read all reports once some rank's step takes too long."""
        self._beat += 1
        self._store.set(str(self._mesh.rank), json.dumps(asdict(self._stand(step))))
        late = taken > max(self._seconds, 5 * self._longest)
        self._flag(late)
        if self._mesh.rank != 0 or not (late or self._store.add(_FLAG, 0) > 0):
            return
        found = self._read()
        if not self._before:
            self._before = {-1: self._beat, **{rank: stand.beat for rank, stand in found.items()}}
        elif self._beat >= self._before[-1] + 3 and (not self._said or taken > 2 * self._said):  # all that run reported again
            frozen = [rank for rank, stand in found.items() if rank and self._before.get(rank) == stand.beat]
            self._said, self._before = max(taken, self._seconds), {}
            self._warn(sentence(found, ranks=self._mesh.size, frozen=frozen, seconds=taken, longest=self._longest))

    def _flag(self, late: bool) -> None:
        if late != self._flagged:
            self._flagged = late
            self._store.add(_FLAG, 1 if late else -1)

    def _read(self) -> dict[int, Stand]:
        keys = {rank: str(rank) for rank in range(self._mesh.size)}
        return {rank: Stand(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])}

    def _stand(self, step: int) -> Stand:
        frame = sys._current_frames().get(self._main or 0)
        return Stand(self._beat, step, self._collectives() - self._begun, place_of(frame), is_waiting(frame))

    def _collectives(self) -> int:
        return sum(map(sequence_number, self._groups))


def is_waiting(frame: FrameType | None) -> bool:
    """Whether the innermost frame of a thread is in a file where ranks wait for messages."""
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def place_of(frame: FrameType | None) -> str:
    """`models/net.py:12 in forward`: the innermost line of a thread outside of torch."""
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return line_in_words(frame.f_code, frame.f_lineno)


def line_in_words(code: CodeType, line: int) -> str:
    """`models/net.py:12 in forward`."""
    return f"{os.path.relpath(code.co_filename)}:{line} in {code.co_name}"


# ---------------------------------------------------------------------------------------------- the verdict


def missing(found: dict[int, Stand], *, ranks: int, frozen: Sequence[int]) -> list[int]:
    """The ranks that the others wait for: those that do not report, else those behind, else those that do not wait.

    Empty where none of these tells ranks apart.
    """
    silent = sorted({*(rank for rank in range(ranks) if rank not in found), *frozen})
    if silent:
        return silent
    ahead = max((stand.step, stand.begun) for stand in found.values())
    behind = [rank for rank, stand in found.items() if (stand.step, stand.begun) < ahead]
    if behind:
        return behind
    busy = [rank for rank, stand in found.items() if not stand.waits]
    return busy if len(busy) < ranks else []


def sentence(found: dict[int, Stand], *, ranks: int, frozen: Sequence[int], seconds: float, longest: float) -> str:
    """The warning of rank 0."""
    late = missing(found, ranks=ranks, frozen=frozen)
    step = min((stand.step for stand in found.values()), default=0) + 1
    before = f" (the longest before it took {longest:.1f} s)" if longest else ""
    opening = f"step {step} has not ended after {seconds:.0f} s{before}"
    there = {rank: f"rank {rank} is at {stand.place}" for rank, stand in found.items()}
    if not late:
        return f"{opening}. No rank is behind the others: {'; '.join(there.values())}"
    words = {rank: there.get(rank, f"rank {rank} has not reported yet") for rank in late}
    words |= {rank: f"rank {rank} does not answer; it was last seen at {found[rank].place}" for rank in frozen}
    waiting = next((text for rank, text in there.items() if rank not in late), None)
    others = f". The others wait: {waiting}" if waiting else ""
    return (
        f"{opening}. {len(late)} of {ranks} ranks {'has' if len(late) == 1 else 'have'} not arrived: "
        f"{'; '.join(words.values())}{others}. The run goes on once they come; log.stall_seconds sets when to warn"
    )
