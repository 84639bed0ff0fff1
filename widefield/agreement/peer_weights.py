"""The numbers of a run without servers: every worker's weights, as a function of the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.agreement.all_reduce import AllReduce, weighted_mean
from widefield.agreement.descent import Descent, DescentState
from widefield.agreement.events import Event
from widefield.agreement.gossip import Gossip, PairwiseGossip, PushSum, pairwise_mean, push_sum
from widefield.agreement.mixing import mixed
from widefield.agreement.objectives import Objective
from widefield.agreement.periodic import PeriodicAveraging, SlowMomentum, outer_step, slow_momentum_step

PeerAlgorithm = AllReduce | PeriodicAveraging | Gossip | PairwiseGossip


@dataclass
class Replica:
    """One worker.  held: its weights, which push-sum keeps as a value and a mass.  seen: its own samples so far.

    since: its samples since all last averaged.  rate: of its last step.  read: the weights that its next gradient is of, where
    these are not what it holds then.
    """

    held: PushSum
    state: DescentState
    seen: int = 0
    since: int = 0
    rate: float = 0.0
    read: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        return self.held.weights if self.held.mass != 1 else self.held.value


class PeerWeights:
    """Replicas of living workers; `apply` one event after another.

    A learning rate that depends on samples is of a worker's own so far times the number of workers, which it knows by itself.
    """

    def __init__(self, algorithm: PeerAlgorithm, objective: Objective, workers: int) -> None:
        self.algorithm, self.objective, self.workers = algorithm, objective, workers
        self.replicas = {one: Replica(PushSum(objective.start), DescentState(algorithm.descent)) for one in range(workers)}
        self.gradients: dict[int, tuple[Tensor, int]] = {}
        self.sent: dict[tuple[int, int], tuple[PushSum, set[int]]] = {}
        self.offered: dict[int, Tensor] = {}
        self.agreed = objective.start
        """The weights that all last agreed on, of which outer steps go out."""
        outer = algorithm.outer if isinstance(algorithm, PeriodicAveraging) else None
        self.outer_state = DescentState(outer) if isinstance(outer, Descent) else None
        self.velocity: Tensor | None = None
        self.learned = 0
        self.does: dict[str, Callable[[Event], None]] = {
            "read": self._read, "gradient": self._gradient, "reduce": self._reduce, "step": self._step,
            "average": self._average, "outer": self._outer, "send": self._send, "mix": self._mix, "offer": self._offer,
            "pair": self._pair, "die": self._die, "join": self._join, "stand": _nothing,
        }  # fmt: skip

    def apply(self, event: Event) -> None:
        """Let one event happen.  ValueError: a kind that only servers know."""
        if event.kind not in self.does:
            raise ValueError(
                f"an event of the kind {event.kind} in the log of {type(self.algorithm).__name__}; replay it with its own "
                "algorithm"
            )
        self.does[event.kind](event)

    def consensus(self) -> Tensor:
        """(P,) the mean of the living workers' weights."""
        return torch.stack([one.weights for one in self.replicas.values()]).mean(0)

    def distance(self) -> float:
        """The consensus distance: the root of the mean over living workers of |weights - consensus|^2."""
        stack = torch.stack([one.weights for one in self.replicas.values()])
        return float((stack - stack.mean(0)).square().sum(1).mean().sqrt())

    # ------------------------------------------------------------------------------------------ learning

    def _read(self, event: Event) -> None:
        replica = self.replicas[event.workers[0]]
        replica.read = replica.weights

    def _gradient(self, event: Event) -> None:
        replica = self.replicas[event.workers[0]]
        of = replica.weights if replica.read is None else replica.read
        self.gradients[event.numbers[0]] = self.objective.gradient_of(of, event.samples), len(event.samples)

    def _rate(self, replica: Replica, count: int) -> float:
        return self.algorithm.descent.rate(seen=replica.seen * self.workers, count=count)

    def _step(self, event: Event) -> None:
        replica = self.replicas[event.workers[0]]
        gradient, count = self.gradients.pop(event.numbers[0])
        before = replica.weights
        replica.rate = self._rate(replica, count)
        after = replica.state.step(before, gradient, replica.rate)
        replica.held = PushSum(after) if replica.held.mass == 1 else replica.held.moved(after - before)
        replica.seen, replica.since = replica.seen + count, replica.since + count
        self.learned += count

    def _reduce(self, event: Event) -> None:
        gradients, counts = zip(*(self.gradients.pop(number) for number in event.numbers), strict=True)
        mean, count = weighted_mean(gradients, counts), sum(counts)
        rate = self.algorithm.descent.rate(seen=self.learned, count=count)
        for replica in self.replicas.values():
            replica.held = PushSum(replica.state.step(replica.weights, mean, rate))
        self.learned += count

    # ------------------------------------------------------------------------------------------ agreeing

    def _mean_of(self, workers: tuple[int, ...]) -> Tensor:
        replicas = [self.replicas[one] for one in workers]
        if not isinstance(self.algorithm, PeriodicAveraging):
            return torch.stack([one.weights for one in replicas]).mean(0)
        counts = [one.since for one in replicas]
        return weighted_mean([one.weights for one in replicas], counts if sum(counts) else [1] * len(replicas))

    def _average(self, event: Event) -> None:
        self._all_take(self._mean_of(event.workers), event.workers)
        for one in event.workers if event.part else ():
            self.replicas[one].state = DescentState(self.algorithm.descent)

    def _all_take(self, weights: Tensor, workers: tuple[int, ...]) -> None:
        for one in workers:
            self.replicas[one].held = PushSum(weights)
        if len(workers) == len(self.replicas):
            self.agreed = weights
            for replica in self.replicas.values():
                replica.since = 0
                if not getattr(self.algorithm, "keeps_state", True):
                    replica.state = DescentState(self.algorithm.descent)

    def _outer(self, event: Event) -> None:
        assert isinstance(self.algorithm, PeriodicAveraging), "only periodic averaging has an outer step"
        mean, outer = self._mean_of(event.workers), self.algorithm.outer
        if isinstance(outer, SlowMomentum):
            rate = max(self.replicas[one].rate for one in event.workers)
            new, self.velocity = slow_momentum_step(self.agreed, mean, self.velocity, outer, rate)
        else:
            assert outer is not None and self.outer_state is not None, "an outer step has an optimizer"
            new = outer_step(self.agreed, mean, self.outer_state, outer.rate(seen=self.learned, count=outer.lr_samples or 1))
        self._all_take(new, event.workers)

    def _send(self, event: Event) -> None:
        sender, *hearers = event.workers
        if hearers:
            self.sent[sender, event.part] = self.replicas[sender].held, set(hearers)

    def _mix(self, event: Event) -> None:
        hearer, *senders = event.workers
        heard = [self._hear(hearer, key) for key in zip(senders, event.rounds, strict=True)]
        replica = self.replicas[hearer]
        held = [replica.held, *heard]
        if getattr(self.algorithm, "push_sum", False):
            replica.held = push_sum(held, event.weights)
        else:
            replica.held = PushSum(mixed([one.value for one in held], event.weights))

    def _hear(self, hearer: int, key: tuple[int, int]) -> PushSum:
        """What was sent; it is forgotten once all hearers have it."""
        held, hearers = self.sent[key]
        hearers.discard(hearer)
        if not hearers:
            del self.sent[key]
        return held

    def _offer(self, event: Event) -> None:
        for one in event.workers:
            self.offered[one] = self.replicas[one].weights

    def _pair(self, event: Event) -> None:
        one, other = event.workers
        mean = pairwise_mean(self.offered.pop(one), self.offered.pop(other))
        self.replicas[one].held = self.replicas[other].held = PushSum(mean)

    # ------------------------------------------------------------------------------------------ dying

    def _die(self, event: Event) -> None:
        self.learned -= 0 if self.replicas.pop(event.workers[0], None) is None else len(event.samples)

    def _join(self, event: Event) -> None:
        worker, peer = event.workers
        one = self.replicas[peer]
        self.replicas[worker] = Replica(PushSum(one.weights), one.state.copy(), one.seen, one.since, one.rate)


def _nothing(event: Event) -> None:
    """What changes no weights."""
