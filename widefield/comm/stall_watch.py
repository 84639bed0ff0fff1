"""Which rank is missing when a step does not end?  Who is slow?  A thread on each rank looks, and ends a run that hangs.

The thread has a connection to the rendezvous store of its own, so it works while every collective hangs.  It looks at the
main thread ten times a second: from that it knows how much of its time the rank waits for data and for others, without a
message.  Once a second it asks the store whether some rank's step takes too long.  Only then all ranks report where they
stand (stand.py), and the first rank that runs says which ones are missing (verdict.py).  A late step alone stops nothing.

A run hangs where nothing has changed on any rank for long: the same line, the same messages, the same step.  It is ended.
A rank may also run on without an end, as in a loop of Python that waits for something.  So within a step, lines that change
count only so long; after that, what counts is what brings the step on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from widefield.comm import flight_recorder
from widefield.comm.fingerprints import Fingerprints, is_possible
from widefield.comm.keepalive import asking_whether_alive
from widefield.comm.mesh import Mesh
from widefield.comm.message_tally import MessageTally, counted
from widefield.comm.stand import DOINGS, Doing, Stand, doing_of, frames_of_threads, is_waiting, place_of, track_of
from widefield.comm.verdict import Spent, missing, sentence, stragglers, stragglers_in_words
from widefield.private_torch.process_groups import c10d_world, get_default_store, sequence_number

T = TypeVar("T")
_watches = itertools.count()
_FLAG = "some rank's step does not end"
_SAMPLE_SECONDS = (0.05, 0.1)
"""The shorter one where a rank is called slow after less than two seconds."""
_ANSWER_SECONDS = 1.0
"""How long an answer of the store may take before the watch looks whether anything else still changes."""
_FROZEN_SECONDS = 2.0
"""A rank whose reports have stopped for so long, and for three looks, does not run."""
SPINS = 10
"""How many times `hang_seconds` a rank may run on within a step that nothing brings on.

With the 600 s of the config that is 100 minutes; a loader that reads large files may take some of them for a batch.
"""
_FEWEST_STEPS = 3
"""Of a look at who is slow."""
_WINDOWS = 2
"""Looks, one after the other, in which a rank must be slow before it is named."""
End = Callable[[str, list[int]], None]


class StallWatch:
    """Watches a training run from a thread; every rank runs it in `with StallWatch(...):` and calls `begin_step` at each step.

    seconds: the first rank warns when a step takes longer than this, and longer than five times the longest step so far.
    hang_seconds: end the run once nothing has changed on any rank for so long; None: never.
    at: gives the number of steps done, and when (time.perf_counter) the current step began; None between steps.
    within: gives what changes when a step goes on, besides messages, as the number of its pass.
    warn: called on one rank with a sentence, from the thread.  end: called there with the sentence and the missing ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        seconds: float,
        at: Callable[[], tuple[int, float | None]],
        warn: Callable[[str], None],
        within: Callable[[], object] = lambda: None,
        hang_seconds: float | None = None,
        end: End = lambda text, culprits: None,
    ) -> None:
        self._mesh, self._seconds, self._hang_seconds = mesh, seconds, hang_seconds
        self._at, self._within, self._warn, self._end = at, within, warn, end
        number = next(_watches)  # the same on every rank; what an earlier watch has written is not read again
        with asking_whether_alive():
            self._store = dist.PrefixStore(f"widefield/stall/{number}", get_default_store().clone())
        self._prints_prefix = f"widefield/fingerprints/{number}"
        self._groups = [group for group in {mesh.group, mesh.data_group, mesh.statistics_group} if group is not None]
        self._begun = self._collectives()
        """Collectives begun before the watch; subtracted, since two ranks may have sent each other messages before."""
        self._main, self._over = threading.main_thread(), threading.Event()
        self._tally, self._times, self._stack = MessageTally(), _Times(), contextlib.ExitStack()
        self._marks = [0, 0]
        """When the last step and this one began, by time.time_ns()."""
        self._prints: Fingerprints | None = None
        self._beat, self._longest, self._said, self._flagged = 0, 0.0, 0.0, False
        self._pause = min(1.0, seconds / 10, (hang_seconds or 10.0) / 10)
        self._share_seconds = min(10.0, seconds / 6)
        self._sample_seconds = min(_SAMPLE_SECONDS[self._share_seconds >= 2.0], self._pause)
        self._track: Any = None
        self._changed = time.monotonic()
        self._advance: Any = None
        self._advanced = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        """Each rank's last beat, and when it was first seen, since some rank is late."""
        self._late_since: float | None = None
        self._slow, self._asker = _SlowRanks(mesh.size), _Asker()
        self._thread = threading.Thread(target=self._watch, name="widefield stall watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._stack.enter_context(counted(self._tally, of_stages=self._mesh.plan.stage > 1))
        if self._mesh.group is not None and is_possible(self._mesh.group):
            groups = [group for group in c10d_world.pg_map if group is not self._mesh.checkpoint_group]
            store = dist.PrefixStore(self._prints_prefix, get_default_store().clone())
            self._prints = Fingerprints(store, groups, rank=self._mesh.rank)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(10.0)  # it is a daemon; a store that is gone may keep it longer
        self._asker.close()
        if self._prints is not None:
            self._prints.close()
        self._stack.close()

    def begin_step(self) -> None:
        """A step begins; the main thread calls it."""
        self._marks = [self._marks[1], time.time_ns()]
        self._tally.begin_step()
        if self._prints is not None:
            self._prints.begin_step()
            self._prints = self._prints if self._prints.is_open else None

    def oddity(self) -> str:
        """In what this rank's messages of this step differ from those of the step before; empty where they do not.

        It tells something of a rank only where others do not differ too: the last batch of an epoch may have other messages.
        """
        if self._at()[1] is None:  # in an evaluation, or a save
            return ""
        with contextlib.suppress(Exception):  # asked while an error is reported, which it must not hide
            before, step = self._marks
            return self._tally.odd() or (
                flight_recorder.odd(self._recorded(), before_ns=before, step_ns=step) if before else ""
            )
        return ""

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        step, last, looked = -1, 0.0, 0.0
        while not self._over.wait(self._sample_seconds):
            done, since = self._at()
            self._times.add(doing_of(self._frame(), self._main.native_id), in_step=since is not None)
            taken = 0.0 if since is None else time.perf_counter() - since
            if done != step:
                self._longest = max(self._longest, last)
                step, last, self._said = done, 0.0, 0.0
            last = max(last, taken)
            if time.monotonic() - looked < self._pause:
                continue
            looked = time.monotonic()
            try:
                self._look(done, taken)
            except RuntimeError:
                return  # the process that serves the store has ended; the launcher says why

    def _look(self, step: int, taken: float) -> None:
        """Notice whether anything changes; where some rank's step takes too long, report, and say who is missing."""
        idle = self._idle(step)
        late = self._is_late(taken) or (self._hang_seconds is not None and idle > self._hang_seconds / 2)
        if not self._asked(lambda: self._flag(late)):
            self._heard, self._late_since = {}, None
            self._share_times(step)
            return
        self._late_since = self._late_since or time.monotonic()
        self._beat += 1
        mine = self._stand(step, idle, taken)
        found = self._asked(lambda: self._exchanged(mine))
        frozen = self._frozen(found)
        if not any(rank in found and rank not in frozen for rank in range(self._mesh.rank)):  # no rank before this one looks
            self._judge(found, frozen)

    def _judge(self, found: dict[int, Stand], frozen: list[int]) -> None:
        if self._late_since is None or time.monotonic() - self._late_since < 3 * self._pause:  # all that run report by then
            return
        running = [stand for rank, stand in found.items() if rank not in frozen]
        idle, taken = min(stand.idle for stand in running), max(stand.taken for stand in running)
        about: dict[str, Any] = {"ranks": self._mesh.size, "frozen": frozen, "longest": self._longest}
        if self._hang_seconds is not None and idle > self._hang_seconds:
            self._end(sentence(found, seconds=idle, ends=True, **about), missing(found, ranks=self._mesh.size, frozen=frozen))
            self._over.set()
        elif self._is_late(taken) and (not self._said or taken > 2 * self._said):
            self._said = max(taken, self._seconds)
            self._warn(sentence(found, seconds=taken, **about))

    def _is_late(self, taken: float) -> bool:
        return taken > max(self._seconds, 5 * self._longest)

    def _frozen(self, found: Mapping[int, Stand]) -> list[int]:
        """The ranks whose reports have stopped."""
        now, most = time.monotonic(), max(_FROZEN_SECONDS, 3 * self._pause)
        for rank, stand in found.items():
            if self._heard.get(rank, (None, 0.0))[0] != stand.beat:
                self._heard[rank] = (stand.beat, now)
        return [rank for rank in found if rank != self._mesh.rank and now - self._heard[rank][1] > most]

    # ------------------------------------------------------------------------------------------ the store

    def _asked(self, ask: Callable[[], T]) -> T:
        """What the store answers.

        RuntimeError: no answer comes.  Then nobody can be told either, and a run in which nothing changes is ended here.
        """
        answer = self._asker.submit(ask)
        while True:
            try:
                return answer.result(_ANSWER_SECONDS)
            except TimeoutError:
                idle = self._idle(self._at()[0])
                if self._over.is_set():
                    raise RuntimeError("the watch is over") from None
                if self._hang_seconds is not None and idle > self._hang_seconds:
                    self._end(_without_a_store(self._mesh, idle, place_of(self._frame())), [0])
                    raise RuntimeError("the store does not answer") from None

    def _flag(self, late: bool) -> bool:
        """Say whether this rank is late, where that is new; returns whether any rank is."""
        change = int(late) - int(self._flagged)
        self._flagged = late
        return self._store.add(_FLAG, change) > 0

    def _exchanged(self, mine: Stand) -> dict[int, Stand]:
        """Write this rank's report; returns all that there are."""
        self._store.set(str(self._mesh.rank), json.dumps(asdict(mine)))
        return self._read(lambda values: Stand(**values))

    def _read(self, of: Callable[[dict[str, Any]], T], prefix: str = "") -> dict[int, T]:
        keys = {rank: f"{prefix}{rank}" for rank in range(self._mesh.size)}
        return {rank: of(json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])}

    def _share_times(self, step: int) -> None:
        """Every now and then, write where this rank's time went; the first rank says who is slow."""
        if not self._times.is_due(step, self._share_seconds):
            return
        text = json.dumps(asdict(self._times.spent(step)))
        self._asked(lambda: self._store.set(f"times/{self._mesh.rank}", text))
        if self._mesh.rank == 0:
            found = self._asked(lambda: self._read(lambda values: Spent(**values), "times/"))
            slow = self._slow.sentence(found)
            if slow:
                self._warn(slow)

    # ------------------------------------------------------------------------------------------ this rank

    def _frame(self) -> Any:
        return frames_of_threads().get(self._main.ident or 0)

    def _idle(self, step: int) -> float:
        """For how many seconds nothing has changed on this rank: its line, its messages, its steps, its saving thread.

        Where only lines change for longer than a step may take, what is above that.
        """
        saving = next((thread.ident for thread in threading.enumerate() if thread.name == "checkpoint"), None)
        frames = frames_of_threads()
        tracks = (track_of(frames.get(self._main.ident or 0)), track_of(frames.get(saving or 0)))
        advance = (step, self._at()[1], self._within(), self._collectives(), self._tally.posted)
        now = time.monotonic()
        if (*advance, *tracks) != self._track:
            self._track, self._changed = (*advance, *tracks), now
        if advance != self._advance:
            self._advance, self._advanced = advance, now
        return max(now - self._changed, self._spun(now) - self._may_spin())

    def _spun(self, now: float) -> float:
        """For how many seconds nothing has brought this rank's step on; 0 between steps, as in an evaluation or a save."""
        return 0.0 if self._at()[1] is None else now - self._advanced

    def _may_spin(self) -> float:
        return math.inf if self._hang_seconds is None else max(SPINS * self._hang_seconds, 5 * self._longest)

    def _stand(self, step: int, idle: float, taken: float) -> Stand:
        frame = self._frame()
        doing, waits = doing_of(frame, self._main.native_id), is_waiting(frame)
        under_way = flight_recorder.under_way(self._recorded()) if waits else None
        spun = self._spun(time.monotonic())
        return Stand(
            self._beat, step, self._collectives() - self._begun, place_of(frame), waits, doing, idle, taken,
            message="" if under_way is None else str(under_way), sent=self._tally.by_rank("send"),
            awaited=self._tally.by_rank("receive"), odd=self.oddity(),
            spun=spun if not waits and spun > self._may_spin() else 0.0,
        )  # fmt: skip

    def _recorded(self) -> list[flight_recorder.RecordedCollective]:
        """What the recorder holds of the groups of this run, but not of that of the thread that saves."""
        saving = self._mesh.checkpoint_group
        return [one for one in flight_recorder.recorded() if saving is None or one.group != saving.group_name]

    def _collectives(self) -> int:
        return sum(map(sequence_number, self._groups))


def _without_a_store(mesh: Mesh, seconds: float, place: str) -> str:
    return (
        f"nothing has changed on rank {mesh.rank} for {seconds:.0f} s, and the store at which the ranks met does not answer: "
        f"the process that serves it, rank 0 or the launcher, is stopped or its machine is gone. Rank {mesh.rank} is at "
        f"{place}. So the run ends; log.hang_seconds sets after how long"
    )


class _Asker:
    """Asks the store on a thread of its own, so that a store without an answer does not hold up the one who asks."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="widefield stall watch store", daemon=True)
        self._thread.start()

    def submit(self, ask: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._questions.put((ask, answer))
        return answer

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(1.0)

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            ask, answer = question
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)


# ---------------------------------------------------------------------------------------------- where the time goes


class _Times:
    """Seconds by what the main thread does, in steps, since the last report."""

    def __init__(self) -> None:
        self._seconds: dict[Doing, float] = dict.fromkeys(DOINGS, 0.0)
        self._last, self._step, self._since = time.monotonic(), 0, time.monotonic()

    def add(self, doing: Doing, *, in_step: bool) -> None:
        """The time since the last call went to `doing`."""
        now = time.monotonic()
        if in_step:
            self._seconds[doing] += now - self._last
        self._last = now

    def is_due(self, step: int, seconds: float) -> bool:
        return step - self._step >= _FEWEST_STEPS and time.monotonic() - self._since >= seconds

    def spent(self, step: int) -> Spent:
        """Seconds per step since the last call."""
        steps = step - self._step
        data, message, work = (self._seconds[doing] / steps for doing in DOINGS)
        self._seconds = dict.fromkeys(DOINGS, 0.0)
        self._step, self._since = step, time.monotonic()
        return Spent(steps, data, work, message)


class _SlowRanks:
    """Names a rank once it has been slow in _WINDOWS looks, and again only when another one is."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._times, self._slow, self._told = ranks, 0, list[int](), list[int]()

    def sentence(self, spent: Mapping[int, Spent]) -> str | None:
        """What is to be said now; None where nothing is new, or not all ranks have reported."""
        slow = stragglers(spent) if len(spent) == self._ranks else []
        self._times = self._times + 1 if slow and slow == self._slow else 1
        self._slow = slow
        if not slow or self._times < _WINDOWS or slow == self._told:
            return None
        self._told = slow
        return stragglers_in_words(spent, slow)
