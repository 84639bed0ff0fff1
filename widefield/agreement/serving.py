"""Who may read from a server now, and which gradients may be applied?  For a server of a real run, in the order of what comes.

A *share* is (step, place): the samples of one step of the run at one of `places`.  Each is learned from exactly once: one that
a worker had taken and not pushed when it died is handed out again.  There are no weights here and no processes; the rules of
waiting are those of the simulator (server.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from widefield.agreement.server import ParameterServer, StalenessClocks, StalenessLimit

Share = tuple[int, int]
Reading = tuple[int, int]
"""A worker, and which of its readings of weights it is."""
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
    taken: dict[Hashable, Share] = field(default_factory=dict)
    """By who has it: a worker, or one of its readings."""
    learned: dict[int, set[int]] = field(default_factory=dict)
    """By step, the places whose gradients are applied."""

    def first(self) -> Share | None:
        """What is handed out next; None where nothing is left before the limit."""
        while not self.left and self.step < self.limit:
            self.left.extend((self.step, place) for place in self.places(self.step))
            self.step += 1
        return self.left[0] if self.left else None

    def take(self, who: Hashable) -> Share:
        assert who not in self.taken, f"{who} takes a share while it has {self.taken[who]}"
        share = self.first()
        assert share is not None, "nobody takes a share where none is left"
        self.taken[who] = self.left.popleft()
        return share

    def lose(self, who: Hashable) -> Share | None:
        """Who had it died, or is late: its share is the next that is handed out."""
        share = self.taken.pop(who, None)
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
    """A gradient that came from a worker.  reading: of the weights that it is of."""

    worker: int
    share: Share
    gradient: Gradient
    reading: Reading


class Serving(Generic[Gradient]):
    """The state of a server, without its weights.  Workers are known from the start; call `joins` when one asks at first.

    After each call, apply what `due` yields, and then answer all of `ready`.

    With backup workers, an update is made with the first gradients of the newest weights, as many as there are workers that
    are no backup; then the shares of all others are handed out again, and their gradients are *late* when they come.
    ahead: how many shares a worker may have besides the one that it pushes next.  Above 0 workers ask for each share (`joins`);
        else a push asks too.
    """

    def __init__(self, algorithm: ParameterServer, shares: Shares, workers: Sequence[int], *, ahead: int = 0) -> None:
        self.compression = algorithm.compression
        self.shares, self.is_synchronous, self.ahead = shares, algorithm.kind == "synchronous", ahead
        self.needed = algorithm.needed(len(workers)) if algorithm.backup else None
        """Gradients of an update, with backup workers."""
        self.living, self.yet_to_come = set(workers), set(workers)
        self.clocks, self.limit = StalenessClocks(algorithm.bound), StalenessLimit(algorithm.max_staleness)
        self.waiting: list[int] = []
        """Workers that ask for weights and a share, the first that came first."""
        self.held: list[Pushed[Gradient]] = []
        self.late: dict[int, Share] = {}
        """By worker, the share that it still computes and that was taken from it."""
        self._begin_together = algorithm.bound is not None or algorithm.kind == "hogwild"
        self._step = shares.step
        self._readings = dict.fromkeys(workers, 0)
        for worker in workers:
            self.clocks.enter(worker)

    def joins(self, worker: int) -> None:
        """A worker asks for weights and a share.  One that came back is as far as the slowest one."""
        self.yet_to_come.discard(worker)
        if worker not in self.clocks.clocks:
            self.clocks.enter(worker)
        self.waiting.append(worker)

    def comes_back(self, worker: int) -> None:
        """A worker that died is there again, and will ask; nobody waits for it until then."""
        self.living.add(worker)

    def has(self, worker: int) -> list[Share]:
        """The shares that a worker has and has not pushed, the first that it was given first; not the late one."""
        return [share for who, share in self.shares.taken.items() if self._is_of(who, worker)]

    def is_awaited(self, worker: int) -> bool:
        """Whether the next message is to come from the worker, and not to go to it."""
        return worker in self.yet_to_come or worker in self.late or bool(self.has(worker))

    def drops_late(self, worker: int) -> None:
        """The worker's late gradient came, which nothing is done with."""
        del self.late[worker]
        self.waiting.append(worker)

    def pushes(self, worker: int, share: Share, gradient: Gradient) -> None:
        """The gradient of a share came that the worker has."""
        reading = next((who for who, one in self.shares.taken.items() if one == share and self._is_of(who, worker)), None)
        assert isinstance(reading, tuple), f"worker {worker} pushes {share} and has {self.has(worker)}"
        del self.shares.taken[reading]
        self.held.append(Pushed(worker, share, gradient, reading))
        if self.is_synchronous:
            self.waiting.append(worker)

    def goes(self, worker: int) -> list[Share]:
        """A worker died; the shares that are handed out again.  What it had pushed is applied all the same."""
        self.living.discard(worker)
        self.yet_to_come.discard(worker)
        self.waiting = [one for one in self.waiting if one != worker]
        self.clocks.leave(worker)
        self.late.pop(worker, None)
        return self._hand_out_again([who for who in self.shares.taken if self._is_of(who, worker)])

    def _hand_out_again(self, readings: Sequence[Hashable]) -> list[Share]:
        """In the order in which they were given."""
        lost = []
        for reading in reversed(readings):
            self.limit.forget(reading)  # type: ignore[arg-type]
            lost.append(self.shares.lose(reading))
        return [share for share in reversed(lost) if share is not None]

    @staticmethod
    def _is_of(who: Hashable, worker: int) -> bool:
        return isinstance(who, tuple) and who[0] == worker

    def due(self) -> Iterator[list[Pushed[Gradient]]]:
        """The gradients of each update that may be made now, one update after another."""
        if self.needed is not None:
            yield from self._first(self.needed)
        else:
            yield from self._steps() if self.is_synchronous else self._updates()

    def _first(self, needed: int) -> Iterator[list[Pushed[Gradient]]]:
        """An update once enough gradients of these weights are here, or no more can come; then all others are late."""
        while self.held and (len(self.held) >= needed or not (self.shares.taken or self.shares.first())):
            found, self.held = sorted(self.held, key=lambda one: one.share), []
            for one in found:
                self.shares.learn(one.share)
            self.late |= {who[0]: share for who, share in self.shares.taken.items() if isinstance(who, tuple)}
            self._hand_out_again(list(self.shares.taken))
            yield found

    def _steps(self) -> Iterator[list[Pushed[Gradient]]]:
        """A step once the gradients of all its places are here, in the order of these."""
        while len(self.held) == len(self.shares.places(self._step)):
            found, self.held, self._step = sorted(self.held, key=lambda one: one.share), [], self._step + 1
            for one in found:
                self.shares.learn(one.share)
            yield found

    def _updates(self) -> Iterator[list[Pushed[Gradient]]]:
        while (one := next((one for one in self.held if self.limit.may_push(one.reading)), None)) is not None:
            self.held.remove(one)
            self.limit.push(one.reading)
            self.clocks.advance(one.worker)
            self.shares.learn(one.share)
            if one.worker in self.living and not self.ahead:
                self.waiting.append(one.worker)
            yield [one]

    def ready(self) -> Iterator[tuple[int, Share]]:
        """Workers that may read now, each with its share."""
        if self._begin_together and self.yet_to_come:
            return
        for worker in list(self.waiting):
            share = self.shares.first()
            if share is None:
                return
            if self._may_read(worker, share):
                self.waiting.remove(worker)
                reading, self._readings[worker] = (worker, self._readings[worker]), self._readings[worker] + 1
                self.limit.read(reading)
                yield worker, self.shares.take(reading)

    def _may_read(self, worker: int, share: Share) -> bool:
        if self.needed is not None:  # one gradient each of the newest weights, and more only where too few workers are left
            pushed = any(one.worker == worker for one in self.held)
            return not pushed or len(self.held) + len(self.shares.taken) < self.needed
        if self.is_synchronous:
            return share[0] <= self._step
        on_way = len(self.has(worker)) + sum(one.worker == worker for one in self.held)
        return on_way <= self.ahead and self.clocks.may_read(worker, on_way=on_way) and self.limit.may_read()
