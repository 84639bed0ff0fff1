"""What workers that average in pairs told of their doings, in an order in which it may have happened: by their clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from widefield.agreement.events import Event
from widefield.agreement.pair_account import Lost
from widefield.asynchrony.pair_messages import Done


@dataclass
class _Step:
    """A step with a gradient.  done: None until somebody tells of it."""

    gradient: int
    samples: tuple[int, ...]
    seconds: float
    done: Done | None = None
    is_written: bool = False


@dataclass
class PairJournal:
    """workers: how many.  seconds_of: from the system's microseconds."""

    workers: int
    seconds_of: Callable[[int], float]
    steps: dict[tuple[int, int], _Step] = field(default_factory=dict)
    """By worker and number of its step."""
    known: list[int] = field(init=False)
    """By worker, the clock of the last of its doings that is known; of a worker, all are told in order."""
    _pairs: list[Done] = field(default_factory=list)
    _of_gradients: dict[int, _Step] = field(default_factory=dict)
    """By the number of the gradient, steps of which nobody told yet."""
    _dead: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By worker that died, the samples lost with it or with others after it; not yet written."""

    def __post_init__(self) -> None:
        self.known = [0] * self.workers

    def learns(self, worker: int, number: int, *, gradient: int, samples: tuple[int, ...], seconds: float) -> None:
        """A worker is about to make its step `number`, counted from 1."""
        self.steps[worker, number] = self._of_gradients[gradient] = _Step(gradient, samples, seconds)

    def did(self, done: Sequence[Done]) -> None:
        """What a worker told, of itself or of one that is dead."""
        for one in done:
            if one.clock <= self.known[one.worker]:
                continue  # another one told of it before
            self.known[one.worker] = one.clock
            if one.is_step:
                self._of_gradients.pop(one.number).done = one
            else:
                self._pairs.append(one)

    def dies(self, worker: int) -> None:
        self._dead.setdefault(worker, ())

    def loses(self, lost: Lost) -> None:
        """Steps are in no living worker's weights: those that were told of are taken back, of others nothing is said."""
        for number in lost.shares:
            step = self.steps.pop((lost.worker, number))
            if step.done is None:
                del self._of_gradients[step.gradient]
                continue
            self._dead[lost.worker] = (*self._dead.get(lost.worker, ()), *step.samples)
            if not step.is_written:
                self.steps[lost.worker, -number] = step  # it was made, and is written like others

    def due(self) -> list[Event]:
        """All that is not written yet, in order.  Everybody has told what it did, and of each death is known what it lost."""
        steps = [step for step in self.steps.values() if not step.is_written]
        found = [(one.clock, one.worker, self._of_pair(one)) for one in self._pairs]
        for step in steps:
            assert step.done is not None, f"the gradient {step.gradient} is in somebody's weights, and nobody told of it"
            found.append((step.done.clock, step.done.worker, self._of_step(step, step.done)))
            step.is_written = True
        events = [event for *_, events in sorted(found, key=lambda one: one[:2]) for event in events]
        last = max((event.time for event in events), default=0.0)
        events += [Event(last, "die", (worker,), samples) for worker, samples in self._dead.items()]
        self._dead.clear()
        self._pairs.clear()
        return events

    def forget(self, worker: int, kept: Sequence[int]) -> None:
        """Let go of a worker's steps but those with the numbers `kept`."""
        self.steps = {key: one for key, one in self.steps.items() if key[0] != worker or key[1] in kept}

    def _of_step(self, step: _Step, done: Done) -> list[Event]:
        seconds, worker, numbers = self.seconds_of(done.micros), (done.worker,), (step.gradient,)
        return [
            Event(seconds, "gradient", worker, step.samples, numbers=numbers, seconds=step.seconds),
            Event(seconds, "step", worker, numbers=numbers),
            Event(seconds, "read", worker),
        ]

    def _of_pair(self, pair: Done) -> list[Event]:
        workers, seconds = (pair.worker, pair.other), self.seconds_of(pair.micros)
        return [Event(seconds, "offer", workers, bytes=pair.number), Event(seconds, "pair", workers)]
