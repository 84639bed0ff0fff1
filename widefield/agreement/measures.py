"""What is measured of a simulated run: loss against virtual time, staleness, consensus distance, bytes, idle time, speed.

All but the loss and the consensus distance are functions of the log alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from widefield.agreement.events import Event, EventLog
from widefield.agreement.objectives import Objective, check_is_finite
from widefield.agreement.sample_account import times_learned

CHANGES = {"push", "reduce", "step", "average", "outer", "mix", "pair"}
"""Kinds of event after which weights differ from before."""


class HasWeights(Protocol):
    """The numbers of a run.  learned: samples so far."""

    learned: int

    def consensus(self) -> Tensor: ...
    def distance(self) -> float: ...


@dataclass(frozen=True)
class LossPoint:
    """The loss over the whole data set of the consensus, at a time, after so many samples; and the consensus distance."""

    seconds: float
    samples: int
    loss: float
    distance: float


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """A run: its log, the weights at its end (the consensus of the living, or the servers'), and what was measured.

    losses: in the order of time.  learned: how often each sample of each epoch was learned from; 1 is right.
    staleness: how many updates had which staleness; of servers only, per part.
    idle_seconds: by worker, the time it lived and did not compute.
    """

    log: EventLog
    weights: Tensor
    losses: tuple[LossPoint, ...]
    staleness: Counter[int]
    idle_seconds: tuple[float, ...]
    bytes_sent: int
    learned: Counter[int]

    @property
    def seconds(self) -> float:
        return self.log.seconds

    @property
    def samples_per_second(self) -> float:
        """Samples learned per virtual second."""
        return sum(self.learned.values()) / self.seconds if self.seconds else float("inf")


@dataclass
class Measured:
    """Looks at the numbers after every `every` samples."""

    objective: Objective
    every: int
    points: list[LossPoint] = field(default_factory=list)
    next_at: int = 0

    def look(self, event: Event, weights: HasWeights) -> None:
        if event.kind in CHANGES and weights.learned >= self.next_at:
            self._measure(event.time, weights)
            self.next_at = weights.learned + self.every

    def _measure(self, seconds: float, weights: HasWeights) -> Tensor:
        """The consensus of which a point was added."""
        consensus = weights.consensus()
        check_is_finite(consensus, seconds)
        self.points.append(LossPoint(seconds, weights.learned, self.objective.loss(consensus), weights.distance()))
        return consensus

    def finish(self, log: EventLog, weights: HasWeights) -> SimulatedRun:
        """Measure once more, and put it all together."""
        final = self._measure(log.seconds, weights)
        return SimulatedRun(
            log,
            final,
            tuple(self.points),
            staleness_of(log),
            idle_seconds(log),
            bytes_sent(log),
            times_learned(log),
        )


def staleness_of(log: EventLog) -> Counter[int]:
    """How many updates had which staleness: updates of the part between the reading of the weights and the push."""
    versions: Counter[int] = Counter()
    read: defaultdict[int, dict[int, int]] = defaultdict(dict)
    of_gradient: dict[int, dict[int, int]] = {}
    found: Counter[int] = Counter()
    for event in log.events:
        if event.kind == "read":
            read[event.workers[0]][event.part] = versions[event.part]
        elif event.kind == "gradient":
            of_gradient[event.numbers[0]] = dict(read[event.workers[0]])
        elif event.kind == "push":
            found[versions[event.part] - of_gradient[event.numbers[0]][event.part]] += 1
            versions[event.part] += 1
    return found


def bytes_sent(log: EventLog) -> int:
    return sum(event.bytes for event in log.events)


def idle_seconds(log: EventLog) -> tuple[float, ...]:
    """By worker, the seconds that it lived and did not compute: waits and messages.

    Times are rounded sums, so what is below 0 by rounding is 0.
    """
    idle, since = dict.fromkeys(range(log.workers), 0.0), dict.fromkeys(range(log.workers), 0.0)
    for event in log.events:
        worker = event.workers[0]
        if event.kind in ("gradient", "die"):
            idle[worker] -= event.seconds
        if event.kind == "die" and worker in since:
            idle[worker] += event.time - since.pop(worker)
        elif event.kind == "join":
            since.setdefault(worker, event.time)
    for worker, begun in since.items():
        idle[worker] += log.seconds - begun
    return tuple(max(0.0, idle[worker]) for worker in range(log.workers))
