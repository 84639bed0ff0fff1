"""What workers that average in pairs told of their doings, in an order in which it may have happened: by their clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from widefield.agreement.events import Event
from widefield.agreement.pair_account import Lost
from widefield.asynchrony.pair_messages import Done

BEFORE, AFTER = 0.5, 0.25
"""What is known to have come just before or after a clock."""


@dataclass
class _Step:
    """A step with a gradient.  clock: None until the worker, or one that it averaged with, tells of it."""

    gradient: int
    samples: tuple[int, ...]
    seconds: float
    clock: float | None = None
    micros: int = 0
    is_written: bool = False


@dataclass(frozen=True)
class _Pair:
    """active, passive: workers.  made: by each of these, how many steps of its own it had made."""

    clock: int
    active: int
    passive: int
    made: tuple[int, int]
    micros: int


@dataclass
class PairJournal:
    """actives: the workers that ask for means.  nbytes: of what a pair sends.  seconds_of: from the system's microseconds."""

    actives: Sequence[int]
    nbytes: int
    seconds_of: Callable[[int], float]
    steps: dict[tuple[int, int], _Step] = field(default_factory=dict)
    """By worker and number of its step."""
    pairs: dict[tuple[int, int, int], _Pair] = field(default_factory=dict)
    dead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By worker that died, the samples lost with it or with others after it; not yet written."""
    gone: set[int] = field(default_factory=set)
    _last: dict[int, float] = field(default_factory=dict)
    """By worker, the clock of what it did last."""
    _written: dict[int, float] = field(default_factory=dict)
    """The same of what is written."""

    def learns(self, worker: int, number: int, *, gradient: int, samples: tuple[int, ...], seconds: float) -> None:
        """A worker is about to make its step `number`, counted from 1."""
        self.steps[worker, number] = _Step(gradient, samples, seconds)

    def did(self, worker: int, did: Sequence[Done]) -> None:
        """What a worker told."""
        own = {step.gradient: step for (of, _), step in self.steps.items() if of == worker and step.clock is None}
        for one in did:
            if one.clock <= self._written.get(worker, 0):
                continue  # a pair of which the other one told before all stood
            self._last[worker] = max(self._last.get(worker, 0), one.clock)
            if one.is_step:
                own[one.own].clock, own[one.own].micros = one.clock, one.micros
                continue
            active, passive = (worker, one.other) if worker in self.actives else (one.other, worker)
            made = (one.own, one.others) if worker == active else (one.others, one.own)
            self._last[one.other] = max(self._last.get(one.other, 0), one.clock)
            self.pairs.setdefault((one.clock, active, passive), _Pair(one.clock, active, passive, made, one.micros))

    def dies(self, worker: int) -> None:
        self.dead.setdefault(worker, ())

    def loses(self, lost: Lost) -> None:
        """Steps are in no living worker's weights: those that were told of are taken back, of others nothing is said."""
        for number in lost.shares:
            step = self.steps.pop((lost.worker, number))
            if step.is_written or step.clock is not None:
                self.dead[lost.worker] = (*self.dead.get(lost.worker, ()), *step.samples)
                if not step.is_written:
                    self.steps[lost.worker, -number] = step  # it was made, and is written like others

    def due(self) -> list[Event]:
        """All that is not written yet, in order.  Everybody has told what it did, and of each death is known what it lost."""
        for (worker, number), step in self.steps.items():
            if step.clock is None:
                pair = self._that_saw(worker, number)
                step.clock, step.micros = pair.clock - BEFORE, pair.micros
        found: list[tuple[float, int, list[Event]]] = []
        for (worker, _), step in self.steps.items():
            if not step.is_written:
                assert step.clock is not None
                found.append((step.clock, worker, self._of_step(worker, step)))
                step.is_written = True
        found += [(one.clock, one.active, self._of_pair(one)) for one in self.pairs.values()]
        seconds = max((events[-1].time for *_, events in found), default=0.0)
        for worker, samples in self.dead.items():
            clock = math.inf if worker in self.gone else self._last.get(worker, 0) + AFTER
            found.append((clock, worker, [Event(seconds, "die", (worker,), samples)]))
        self._written = dict(self._last)
        self.gone |= self.dead.keys()
        self.dead.clear()
        self.pairs.clear()
        return [event for *_, events in sorted(found, key=lambda one: one[:2]) for event in events]

    def forget(self, worker: int, kept: Sequence[int]) -> None:
        """Let go of a worker's steps but those with the numbers `kept`."""
        self.steps = {key: one for key, one in self.steps.items() if key[0] != worker or key[1] in kept}

    def _that_saw(self, worker: int, number: int) -> _Pair:
        """The first pair that had a step of a worker that died before it told of it."""
        seen = [
            one for one in self.pairs.values()
            if worker in (one.active, one.passive) and one.made[int(worker == one.passive)] >= number
        ]  # fmt: skip
        assert seen, f"step {number} of worker {worker} is in somebody's weights, and no pair brought it there"
        return min(seen, key=lambda one: one.clock)

    def _of_step(self, worker: int, step: _Step) -> list[Event]:
        seconds = self.seconds_of(step.micros)
        return [
            Event(seconds, "gradient", (worker,), step.samples, numbers=(step.gradient,), seconds=step.seconds),
            Event(seconds, "step", (worker,), numbers=(step.gradient,)),
            Event(seconds, "read", (worker,)),
        ]

    def _of_pair(self, pair: _Pair) -> list[Event]:
        workers, seconds = (pair.active, pair.passive), self.seconds_of(pair.micros)
        return [Event(seconds, "offer", workers, bytes=self.nbytes), Event(seconds, "pair", workers)]
