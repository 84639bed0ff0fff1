"""Each sample of each epoch is learned from exactly once, whoever dies: who has which, and whose learning would be lost.

A sample's number counts over epochs: epoch * num_samples + its place in the data set.  A worker takes a batch; when its
gradient is applied the batch is learned.  What only workers that died had learned, or had taken, is given out again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from widefield.agreement.events import EventLog

PRUNED_EVERY = 256
"""Exchanges after which batches that all carry are forgotten."""


@dataclass
class SampleAccount:
    """What is left of a run's samples.  A batch never crosses the end of an epoch, so an epoch's last one may be shorter.

    may_lose: whether a worker may die.  Where none does, it need not be known in whose weights a batch is.
    """

    num_samples: int
    epochs: int
    batch: int
    seed: int
    may_lose: bool = True
    epoch: int = field(default=-1, init=False)
    left: deque[int] = field(default_factory=deque, init=False)
    """Of the epoch that is given out now."""
    returned: deque[tuple[int, ...]] = field(default_factory=deque, init=False)
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    """By worker, the batch that it works on."""
    carried: dict[int, set[tuple[int, ...]]] = field(default_factory=dict, init=False)
    """By worker, the batches whose gradients are in its weights, apart from those that everybody has."""
    exchanges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if min(self.num_samples, self.epochs, self.batch) < 1:
            raise ValueError(
                f"{self.epochs} epochs of {self.num_samples} samples in batches of {self.batch}; each has to be 1 or more"
            )

    @property
    def is_complete(self) -> bool:
        """Whether every sample of all epochs has been learned."""
        return not self.taken and not self.has_left

    @property
    def has_left(self) -> bool:
        return bool(self.returned or self.left) or self.epoch + 1 < self.epochs

    @property
    def samples_left(self) -> int:
        """How many samples nobody has learned yet, of all epochs."""
        given = sum(map(len, (*self.returned, *self.taken.values(), self.left)))
        return given + (self.epochs - 1 - self.epoch) * self.num_samples

    def take(self, worker: int) -> tuple[int, ...]:
        """The next batch, now this worker's; empty where nothing is left.  What was returned comes first."""
        assert worker not in self.taken, f"worker {worker} takes a batch while it has {self.taken[worker]}"
        batch = self.returned.popleft() if self.returned else self._next()
        if batch:
            self.taken[worker] = batch
        return batch

    def _next(self) -> tuple[int, ...]:
        if not self.left and self.epoch + 1 < self.epochs:
            self.epoch += 1
            order = list(range(self.epoch * self.num_samples, (self.epoch + 1) * self.num_samples))
            random.Random(f"{self.seed} epoch {self.epoch}").shuffle(order)
            self.left.extend(order)
        return tuple(self.left.popleft() for _ in range(min(self.batch, len(self.left))))

    def learned(self, worker: int, *, by_all: bool) -> None:
        """The worker's batch is in the weights: in those that outlive it, or in its own alone."""
        batch = self.taken.pop(worker)
        if self.may_lose and not by_all:
            self.carried.setdefault(worker, set()).add(batch)

    def hand_back(self, batch: tuple[int, ...]) -> None:
        """A batch that was dropped is given out again."""
        self.returned.append(batch)

    def drop(self, worker: int) -> tuple[int, ...]:
        """The worker's batch is given out again; what it was."""
        batch = self.taken.pop(worker, ())
        if batch:
            self.returned.append(batch)
        return batch

    def carried_now(self, worker: int) -> frozenset[tuple[int, ...]]:
        """What is in the weights that a worker sends now."""
        return frozenset(self.carried.get(worker, ()))

    def heard(self, hearer: int, batches: frozenset[tuple[int, ...]]) -> None:
        """The hearer now has these batches in its weights too."""
        if batches:
            self.carried.setdefault(hearer, set()).update(batches)

    def all_agree(self) -> None:
        """Every living worker has the same weights: nobody's learning can be lost."""
        self.carried.clear()

    def forget_common(self, living: list[int]) -> None:
        """Now and then, let go of what all living workers carry."""
        self.exchanges += 1
        if self.carried and self.exchanges % PRUNED_EVERY == 0:
            common = set.intersection(*(self.carried.get(one, set()) for one in living))
            for batches in self.carried.values():
                batches -= common

    def lose(self, worker: int) -> tuple[int, ...]:
        """A worker died: what it alone had learned, which is given out again, as is what it had taken."""
        self.drop(worker)
        gone = self.carried.pop(worker, set()).difference(*self.carried.values())
        batches = sorted(gone)
        self.returned.extend(batches)
        return tuple(sample for batch in batches for sample in batch)


def times_learned(log: EventLog) -> Counter[int]:
    """How often each sample of each epoch is in the weights at the end: gradients, less those dropped or lost.  1 is right."""
    times: Counter[int] = Counter(dict.fromkeys(range(log.num_samples * log.epochs), 0))
    for event in log.events:
        sign = {"gradient": 1, "drop": -1, "die": -1}.get(event.kind, 0)
        if sign:
            for sample in event.samples:
                times[sample] += sign
    return times
