"""Whose weights have learned from which shares, where workers average in pairs and some die?  For AD-PSGD in real processes.

A worker's steps are counted, and it tells how many steps of each worker are in its weights.  A pair takes the mean of whole
weights, so both then have what either had: by worker, the larger count.  So a worker has, of each other, its first steps.

A step is told before it is made.  When a worker dies, each living one is told, from then on takes nothing of it, and tells
once more what it has.  What nobody living has is then lost and handed out again; as is, at once, what the dead had not told of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from widefield.agreement.serving import Share, Shares


@dataclass(frozen=True)
class Lost:
    """What is lost with those that died: shares that `worker` had learned, by the numbers of its steps."""

    worker: int
    shares: Mapping[int, Share]


@dataclass
class _Death:
    """Which living workers were told of it, and have told since what they have."""

    told: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)


class PairAccount:
    """shares: what is left to hand out.  steps: by worker, the shares of its steps by their numbers, from 1, but of those that
    all have.
    living, dead: workers.  waiting: those that ask for a share, the first that came first.
    """

    def __init__(self, shares: Shares, workers: Sequence[int]) -> None:
        self.shares, self.living, self.dead = shares, set(workers), set[int]()
        self.waiting: list[int] = []
        self.steps: dict[int, dict[int, Share]] = {worker: {} for worker in workers}
        self._made = dict.fromkeys(workers, 0)
        self._has: dict[int, Sequence[int]] = {worker: [0] * len(workers) for worker in workers}
        self._deaths: dict[int, _Death] = {}

    def asks(self, worker: int, has: Sequence[int]) -> list[Lost]:
        """A worker asks for a share; what is found to be lost.  has: how many steps of each worker are in its weights."""
        self._has[worker] = tuple(has)
        self.waiting.append(worker)
        for death in self._deaths.values():
            if worker in death.told:
                death.answered.add(worker)
        return self._find_lost()

    def learns(self, worker: int) -> int:
        """A worker is about to step with the gradient of its share; the step's number."""
        share = self.shares.taken.pop(worker)
        self.shares.learn(share)
        self._made[worker] += 1
        self.steps[worker][self._made[worker]] = share
        return self._made[worker]

    def goes(self, worker: int) -> list[Lost]:
        """A worker died."""
        self.living.discard(worker)
        self.dead.add(worker)
        self.waiting = [one for one in self.waiting if one != worker]
        self.shares.lose(worker)
        self._deaths[worker] = _Death()
        return self._find_lost()

    def ready(self) -> list[tuple[int, Share | None]]:
        """Workers that get an answer now: a share, or, where none is left and they do not know of a death, that alone."""
        found: list[tuple[int, Share | None]] = []
        for worker in list(self.waiting):
            if self.shares.first() is not None:
                found.append((worker, self.shares.take(worker)))
            elif any(worker not in death.told for death in self._deaths.values()):
                found.append((worker, None))
            else:
                continue
            self.waiting.remove(worker)
            for death in self._deaths.values():
                death.told.add(worker)
        return found

    @property
    def stands(self) -> bool:
        """Whether all that may be handed out is in the weights of the living, who all wait."""
        return self.shares.first() is None and not self._deaths and set(self.waiting) == self.living

    def at_most(self, worker: int) -> int:
        """How many steps of a worker are in the weights of the living, as far as they have told."""
        return max((self._has[one][worker] for one in self.living), default=0)

    def _find_lost(self) -> list[Lost]:
        for worker in [one for one, death in self._deaths.items() if death.answered >= self.living]:
            del self._deaths[worker]
        if self._deaths or not self.living:
            return []
        found = []
        for worker in sorted(self.dead):
            kept = self.at_most(worker)
            gone = {number: share for number, share in sorted(self.steps[worker].items()) if number > kept}
            if gone:
                self.steps[worker] = {number: share for number, share in self.steps[worker].items() if number <= kept}
                self.shares.again(list(gone.values()))
                found.append(Lost(worker, gone))
        return found

    def forget(self) -> None:
        """Let go of steps that all living workers have; nobody's death can lose them."""
        for worker, steps in self.steps.items():
            all_have = min(self._has[one][worker] for one in self.living)
            self.steps[worker] = {number: share for number, share in steps.items() if number > all_have}
