"""What the times of every algorithm have in common: the log that they write, who lives, and who takes which batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from widefield.agreement.events import Event, EventQueue
from widefield.agreement.sample_account import SampleAccount
from widefield.agreement.workers import Death, Durations


class AllDiedError(RuntimeError):
    """No worker is left that has what the others need."""


@dataclass
class RunTimes:
    """One run in the making.  size: bytes of all weights.

    living: workers, in order.  lives: how often each has died; what was planned for an earlier life does not happen.
    started: by worker, when its gradient in the making began.  ready: by worker, the number of its gradient that is in no
    weights yet.
    """

    durations: Durations
    account: SampleAccount
    size: int
    events: list[Event] = field(default_factory=list)
    living: dict[int, None] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    gradients: int = 0

    def __post_init__(self) -> None:
        self.living = dict.fromkeys(range(self.count))
        self.lives = dict.fromkeys(range(self.count), 0)

    @property
    def count(self) -> int:
        return self.durations.workers.count

    @property
    def deaths(self) -> tuple[Death, ...]:
        return self.durations.workers.deaths

    def write(self, time: float, kind: str, *workers: int, **facts: Any) -> None:
        """Write one event into the log."""
        self.events.append(Event(time, kind, workers, **facts))

    def compute_seconds(self, worker: int, batch: tuple[int, ...]) -> float:
        return self.durations.compute(worker, len(batch) / self.account.batch)

    def new_gradient(self) -> int:
        """The number of the next gradient."""
        self.gradients += 1
        return self.gradients - 1

    def lost_with(self, worker: int) -> tuple[int, ...]:
        """A worker dies: what it had is given out again; the samples of gradients in the log that die with it."""
        unused = self.account.taken.get(worker, ()) if self.ready.pop(worker, None) is not None else ()
        return unused + self.account.lose(worker)

    def all_reduce_seconds(self, workers: Sequence[int]) -> float:
        """2 (n - 1) messages of an n-th of the weights, one after another; the slowest latency counts."""
        messages = 2 * (len(workers) - 1)
        latency = max(self.durations.latency(worker) for worker in workers)
        return messages * (latency + self.durations.transfer(self.size / len(workers))) if messages else 0.0

    def give_up(self, time: float, why: str) -> NoReturn:
        """AllDiedError: with what is left to learn."""
        left = self.account.samples_left
        raise AllDiedError(
            f"at {time:.6g} s {why}, with {left:,} samples left to learn; let fewer workers die, or let them come back sooner"
        )


@dataclass
class QueuedTimes(RunTimes):
    """Times in which whatever happens plans what happens next: no rounds.

    parked: workers that found no batch left; one that dies may give them some.
    """

    queue: EventQueue = field(default_factory=EventQueue)
    parked: set[int] = field(default_factory=set)

    def run(self) -> tuple[float, list[Event]]:
        """(when it ended, the log).  AllDiedError: before everything was learned.  AssertionError: workers wait in a circle."""
        for death in self.deaths:
            self.queue.at(death.at, lambda death=death: self._die(death))  # type: ignore[misc]
        for worker in list(self.living):
            self.begin(worker)
        if not self.queue.run(self.is_done):
            if not self.living:
                self.give_up(self.queue.now, "the last worker died")
            raise AssertionError(f"at {self.queue.now} s workers {list(self.living)} wait for each other without end")
        return self.queue.now, self.events

    def is_done(self) -> bool:
        return self.account.is_complete

    def begin(self, worker: int) -> None:
        """A worker starts, at first or again."""
        raise NotImplementedError

    def computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        """A worker has its gradient."""
        raise NotImplementedError

    def left(self, worker: int) -> tuple[int, ...]:
        """A worker has died: let go of it; the samples of gradients in the log that died with it."""
        raise NotImplementedError

    def came_back(self, worker: int) -> None:
        """A worker lives again: let it take a state, and begin."""
        raise NotImplementedError

    def found_nothing(self, worker: int) -> None:
        """A worker was parked: let go of what waits for it."""

    def after(self, seconds: float, worker: int, action: Any, *arguments: Any) -> None:
        """Plan an action of a worker, which does not happen if it dies before."""
        life = self.lives[worker]

        def unless_died() -> None:
            if self.lives[worker] == life:
                action(worker, *arguments)

        self.queue.at(self.queue.now + seconds, unless_died)

    def take_up(self, worker: int) -> bool:
        """Take a batch and compute its gradient; False, and parked, where nothing is left."""
        batch = self.account.take(worker)
        if not batch:
            self.parked.add(worker)
            self.found_nothing(worker)
            return False
        seconds = self.compute_seconds(worker, batch)
        self.started[worker] = self.queue.now
        self.after(seconds, worker, self._computed, batch, seconds)
        return True

    def _computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        del self.started[worker]
        self.computed(worker, batch, seconds)

    def wake(self) -> None:
        """Batches were given back: let those go on that found none."""
        while self.parked and self.account.returned:
            worker = min(self.parked)
            self.parked.discard(worker)
            self.begin(worker)

    def _die(self, death: Death) -> None:
        worker, now = death.worker, self.queue.now
        self.lives[worker] += 1
        self.living.pop(worker, None)
        self.parked.discard(worker)
        seconds = now - self.started.pop(worker, now)
        place = len(self.events)
        samples = self.left(worker)
        self.events.insert(place, Event(now, "die", (worker,), samples=samples, seconds=seconds))
        if death.back is not None:
            self.queue.at(death.back, lambda: self._come_back(worker))
        self.wake()

    def _come_back(self, worker: int) -> None:
        self.living[worker] = None
        self.came_back(worker)
