"""Who may read from a server now, and which gradients may be applied?  For a server of a real run, in the order of what comes.

A *share* is (step, place): the samples of one step of the run at one of `places`.  Each is learned from exactly once: one that
a worker had taken and not pushed when it died is handed out again.  There are no weights here and no processes; the rules of
waiting are those of the simulator (server.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from widefield.agreement.server import ParameterServer, StalenessClocks, StalenessLimit

Share = tuple[int, int]
Gradient = TypeVar("Gradient")


@dataclass
class Shares:
    """What is left to hand out.  places: of a step, those that have samples.

    step: the next one that is handed out.  limit: the first one that is not.
    """

    places: Callable[[int], Sequence[int]]
    step: int = 0
    limit: int = 0
    left: deque[Share] = field(default_factory=deque)
    taken: dict[int, Share] = field(default_factory=dict)
    """By worker."""
    learned: dict[int, set[int]] = field(default_factory=dict)
    """By step, the places whose gradients are applied."""

    def first(self) -> Share | None:
        """What is handed out next; None where nothing is left before the limit."""
        while not self.left and self.step < self.limit:
            self.left.extend((self.step, place) for place in self.places(self.step))
            self.step += 1
        return self.left[0] if self.left else None

    def take(self, worker: int) -> Share:
        assert worker not in self.taken, f"worker {worker} takes a share while it has {self.taken[worker]}"
        share = self.first()
        assert share is not None, "nobody takes a share where none is left"
        self.taken[worker] = self.left.popleft()
        return share

    def lose(self, worker: int) -> Share | None:
        """The worker died: its share is the next that is handed out."""
        share = self.taken.pop(worker, None)
        if share is not None:
            self.left.appendleft(share)
        return share

    def learn(self, share: Share) -> None:
        places = self.learned.setdefault(share[0], set())
        assert share[1] not in places, f"the share {share} is learned from twice"
        places.add(share[1])

    def again(self, shares: Sequence[Share]) -> None:
        """Shares that were learned are lost: they are the next that are handed out."""
        for step, place in shares:
            self.learned.get(step, set()).discard(place)
        self.left.extendleft(reversed(shares))

    def is_learned(self, step: int) -> bool:
        """Whether all samples of a step are in the weights."""
        return self.learned.get(step, set()) == set(self.places(step))

    def stop(self, step: int) -> None:
        """Hand out nothing of steps that nobody has begun, but all of step `step` and before."""
        self.limit = max(self.step, step + 1)


@dataclass(frozen=True)
class Pushed(Generic[Gradient]):
    """A gradient that came from a worker."""

    worker: int
    share: Share
    gradient: Gradient


class Serving(Generic[Gradient]):
    """The state of a server, without its weights.  Workers are known from the start; call `joins` when one asks at first.

    After each call, apply what `due` yields, and then answer all of `ready`.
    """

    def __init__(self, algorithm: ParameterServer, shares: Shares, workers: Sequence[int]) -> None:
        self.compression = algorithm.compression
        self.shares, self.is_synchronous = shares, algorithm.kind == "synchronous"
        self.living, self.yet_to_come = set(workers), set(workers)
        self.clocks, self.limit = StalenessClocks(algorithm.bound), StalenessLimit(algorithm.max_staleness)
        self.waiting: list[int] = []
        """Workers that ask for weights and a share, the first that came first."""
        self.held: list[Pushed[Gradient]] = []
        self._begin_together = algorithm.bound is not None
        self._step = shares.step
        for worker in workers:
            self.clocks.enter(worker)

    def joins(self, worker: int) -> None:
        self.yet_to_come.discard(worker)
        self.waiting.append(worker)

    def pushes(self, worker: int, gradient: Gradient) -> None:
        """The gradient of the share that the worker has."""
        self.held.append(Pushed(worker, self.shares.taken.pop(worker), gradient))
        if self.is_synchronous:
            self.waiting.append(worker)

    def goes(self, worker: int) -> Share | None:
        """A worker died; the share that is handed out again, if it had one.  What it had pushed is applied all the same."""
        self.living.discard(worker)
        self.yet_to_come.discard(worker)
        self.waiting = [one for one in self.waiting if one != worker]
        self.clocks.leave(worker)
        if not any(one.worker == worker for one in self.held):
            self.limit.forget((worker, 0))
        return self.shares.lose(worker)

    def due(self) -> Iterator[list[Pushed[Gradient]]]:
        """The gradients of each update that may be made now, one update after another."""
        yield from self._steps() if self.is_synchronous else self._updates()

    def _steps(self) -> Iterator[list[Pushed[Gradient]]]:
        """A step once the gradients of all its places are here, in the order of these."""
        while len(self.held) == len(self.shares.places(self._step)):
            found, self.held, self._step = sorted(self.held, key=lambda one: one.share), [], self._step + 1
            for one in found:
                self.shares.learn(one.share)
            yield found

    def _updates(self) -> Iterator[list[Pushed[Gradient]]]:
        while (one := next((one for one in self.held if self.limit.may_push((one.worker, 0))), None)) is not None:
            self.held.remove(one)
            self.limit.push((one.worker, 0))
            self.clocks.advance(one.worker)
            self.shares.learn(one.share)
            if one.worker in self.living:
                self.waiting.append(one.worker)
            yield [one]

    def ready(self) -> Iterator[tuple[int, Share]]:
        """Workers that may read now, each with its share."""
        if self._begin_together and self.yet_to_come:
            return
        for worker in list(self.waiting):
            share = self.shares.first()
            if share is None or (self.is_synchronous and share[0] > self._step):
                return
            if self.clocks.may_read(worker) and self.limit.may_read():
                self.waiting.remove(worker)
                self.limit.read((worker, 0))
                yield worker, self.shares.take(worker)
