"""What a server with a part of the weights does, in the order that the first server gives; without weights or processes.

A worker brings each further server its part of a gradient, and pushes to the first server when all have said that they have
it.  So a push that came to the first server is complete: it is what makes a gradient count.  The first one gives all others
one order of updates and readings.  What a worker brought that died before it pushed is never in that order: all apply a
gradient, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from widefield.agreement.serving import Share

Part = TypeVar("Part")


@dataclass
class PartOrders(Generic[Part]):
    """brought: parts of gradients, by worker and share.  asked: workers that wait for weights.
    readings: by worker, the share and the weights that it may fetch.  struck: workers of which nothing is taken any more.
    """

    brought: dict[tuple[int, Share], Part] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    readings: dict[int, tuple[Share, Part]] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)

    def brings(self, worker: int, share: Share, part: Part) -> bool:
        """A worker brings its part of a gradient; whether it is taken."""
        if worker in self.struck:
            return False
        self.brought[worker, share] = part
        return True

    def asks(self, worker: int) -> None:
        """A worker asks for the weights that it was told of, or will be."""
        self.asked.add(worker)

    def reads(self, worker: int, share: Share, weights: Part) -> None:
        """By order: the worker reads the weights as they are now."""
        if worker not in self.struck:
            self.readings[worker] = share, weights

    def takes(self, pushes: Sequence[tuple[int, Share]]) -> list[Part]:
        """By order: the parts of the gradients of an update."""
        return [self.brought.pop(one) for one in pushes]

    def drops(self, worker: int, share: Share) -> None:
        """By order: a gradient came too late."""
        del self.brought[worker, share]

    def strikes(self, worker: int, *, counted: Sequence[Share]) -> None:
        """By order: nothing of a worker is taken any more.  counted: shares that it had pushed, whose update is to come."""
        self.struck.add(worker)
        self.readings.pop(worker, None)
        for of, share in [one for one in self.brought if one[0] == worker and one[1] not in counted]:
            del self.brought[of, share]

    def ready(self) -> Iterator[tuple[int, Share, Part]]:
        """Who is answered now, and with which weights."""
        for worker in sorted(self.asked & self.readings.keys()):
            self.asked.discard(worker)
            yield worker, *self.readings.pop(worker)

    def refused(self) -> list[int]:
        """Workers that wait for weights and were struck out."""
        found = sorted(self.asked & self.struck)
        self.asked -= self.struck
        return found
