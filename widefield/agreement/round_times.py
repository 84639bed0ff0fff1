"""When do workers that go in rounds step, mix and average?  All-reduce, local SGD and its kin, gossip.

A worker that averages over all waits for all; one that mixes waits for those it hears.  Messages of a round are sent one after
another.  A gradient counts once what came of it has reached another worker, or all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from widefield.agreement.all_reduce import AllReduce, all_reduce_bytes
from widefield.agreement.events import Event, in_time_order
from widefield.agreement.gossip import MASS_BYTES, Gossip
from widefield.agreement.mixing import MixingGraph
from widefield.agreement.periodic import PeriodicAveraging
from widefield.agreement.run_times import RunTimes
from widefield.agreement.workers import Death

Heard = dict[int, list[tuple[int, float]]]
"""Of one round, by hearer: (sender, weight)."""


@dataclass
class RoundTimes(RunTimes):
    """free: by living worker, when it can begin the next round.  steps: rounds that began.

    to_come: deaths that have not happened.  away: dead workers that come back, and when.
    """

    free: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    to_come: dict[int, list[Death]] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.free = dict.fromkeys(self.living, 0.0)
        self.to_come = {worker: self.durations.workers.deaths_of(worker) for worker in self.living}

    def run(self) -> tuple[float, list[Event]]:
        """(when it ended, the log).  AllDiedError: before everything was learned."""
        while not self.account.is_complete:
            self.steps += 1
            self._let_come_back()
            self.one_round()
            if self.account.is_complete:
                self.last_agreement()
        return max(self.free.values()), list(in_time_order(self.events))

    def one_round(self) -> None:
        raise NotImplementedError

    def last_agreement(self) -> None:
        """Let all have the same weights at the end, where they do not."""

    # ------------------------------------------------------------------------------------------ deaths

    def _dies_before(self, worker: int, time: float) -> bool:
        """Whether a worker dies before a time; then it is gone."""
        if not self.to_come[worker] or self.to_come[worker][0].at >= time:
            return False
        death = self.to_come[worker].pop(0)
        samples = self.lost_with(worker)
        seconds = max(0.0, death.at - self.started.pop(worker, death.at))
        self.write(death.at, "die", worker, samples=samples, seconds=seconds)
        del self.free[worker]
        if death.back is not None:
            self.away[worker] = death.back
        if not self.free:
            self.give_up(death.at, "the last worker that lived died")
        return True

    def _let_come_back(self) -> None:
        """Let those live again whose time came before anybody begins this round: each takes the state of who begins first."""
        for worker, back in list(self.away.items()):
            peer = min(self.free, key=lambda one: (self.free[one], one))
            if back <= self.free[peer] and not self._dies_before(peer, self.free[peer]):
                del self.away[worker]
                self.free[worker] = self.free[peer] + self.durations.transfer(self.size) + self.durations.latency(worker)
                self.write(self.free[peer], "join", worker, peer, bytes=self.size)
                self.account.heard(worker, self.account.carried_now(peer))

    # ------------------------------------------------------------------------------------------ what rounds are made of

    def compute(self) -> None:
        """Every living worker takes a batch, if one is left, and computes its gradient, unless it dies meanwhile."""
        for worker in sorted(self.free, key=lambda one: (self.free[one], one)):
            batch = self.account.take(worker)
            seconds = self.compute_seconds(worker, batch)
            self.started[worker] = self.free[worker]
            if not self._dies_before(worker, self.free[worker] + seconds) and batch:
                self.free[worker] += seconds
                self.ready[worker] = self.new_gradient()
                facts = {"samples": batch, "numbers": (self.ready[worker],), "seconds": seconds}
                self.write(self.free[worker], "gradient", worker, **facts)
            self.started.pop(worker, None)

    def step_alone(self) -> None:
        """Each worker steps with its own gradient."""
        for worker, number in self.ready.items():
            self.write(self.free[worker], "step", worker, numbers=(number,))
            self.account.learned(worker, by_all=False)
        self.ready.clear()

    def meet(self, workers: Sequence[int]) -> tuple[float, list[int]]:
        """(when a ring all-reduce of these workers has ended, those of them that lived to see it); they are free then."""
        workers = [worker for worker in workers if worker in self.free]
        seconds = self.all_reduce_seconds(workers) if workers else 0.0
        while workers:
            ends = max(self.free[worker] for worker in workers) + seconds
            if not [worker for worker in workers if self._dies_before(worker, ends)]:
                self.free.update(dict.fromkeys(workers, ends))
                return ends, workers
            workers = [worker for worker in workers if worker in self.free]
        return 0.0, []

    def average(self, workers: Sequence[int], kind: str = "average") -> None:
        """Workers take the mean of their weights."""
        ends, workers = self.meet(workers)
        if workers:
            self.write(ends, kind, *workers, bytes=all_reduce_bytes(len(workers), self.size))
            if len(workers) == len(self.free):
                self.account.all_agree()
                return
            carried = [batches for worker in workers if (batches := self.account.carried_now(worker))]
            for worker in workers:
                for batches in carried:
                    self.account.heard(worker, batches)


@dataclass
class AllReduceTimes(RoundTimes):
    """All wait for all, after each batch."""

    algorithm: AllReduce = field(default_factory=AllReduce)

    def one_round(self) -> None:
        self.compute()
        ends, workers = self.meet(sorted(self.free))
        learners = [worker for worker in workers if worker in self.ready]
        if learners:
            numbers = tuple(self.ready.pop(worker) for worker in learners)
            self.write(ends, "reduce", *learners, numbers=numbers, bytes=all_reduce_bytes(len(workers), self.size))
            for worker in learners:
                self.account.learned(worker, by_all=True)


@dataclass
class PeriodicTimes(RoundTimes):
    """Steps alone; all or a group wait for each other when they average.  has_agreed: whether all did after the last step."""

    algorithm: PeriodicAveraging = field(default_factory=PeriodicAveraging)
    has_agreed: bool = True

    def one_round(self) -> None:
        self.compute()
        self.step_alone()
        size = self.algorithm.averages_after(self.steps, self.count)
        self.has_agreed = size == self.count
        if self.has_agreed:
            self.average(sorted(self.free), "outer" if self.algorithm.has_outer_step(self.steps) else "average")
        elif size > 1:
            for first in range(0, self.count, size):
                self.average([worker for worker in range(first, min(first + size, self.count)) if worker in self.free])

    def last_agreement(self) -> None:
        if not self.has_agreed:
            self.average(sorted(self.free), "average" if self.algorithm.outer is None else "outer")


@dataclass
class GossipTimes(RoundTimes):
    """Each waits for those it hears.

    heard: by round, who hears whom.  batches_sent, sent_at: by round and sender, what the sent weights learned, and when they
    arrive.
    """

    algorithm: Gossip = field(default_factory=Gossip)
    heard: dict[int, Heard] = field(default_factory=dict)
    batches_sent: dict[tuple[int, int], frozenset[tuple[int, ...]]] = field(default_factory=dict)
    sent_at: dict[tuple[int, int], float] = field(default_factory=dict)
    graphs: dict[int, MixingGraph] = field(default_factory=dict)
    """By how many live."""

    def one_round(self) -> None:
        period = self.algorithm.global_period
        averages = period is not None and self.steps % period == 0
        if self.algorithm.combines_first and not averages:
            begins = dict(self.free)
            self.compute()
            own = self._send(begins)
            self._mix(own)
            self.step_alone()
            return
        self.compute()
        self.step_alone()
        if averages:
            self.average(sorted(self.free))
        else:
            self._mix(self._send(dict(self.free)))

    def _send(self, at: dict[int, float]) -> dict[int, float]:
        """Let every living worker send its weights to those who hear it; the part that each keeps of its own."""
        workers, step = sorted(self.free), self.steps
        matrix = self._graph(len(workers)).matrix_at(step - 1)
        self.heard[step] = {one: [] for one in workers}
        hearers_of: Heard = {one: [] for one in workers}
        for (row, column), weight in zip((matrix != 0).nonzero().tolist(), matrix[matrix != 0].tolist(), strict=True):
            if row != column:
                self.heard[step][workers[row]].append((workers[column], weight))
                hearers_of[workers[column]].append((workers[row], weight))
        for sender in workers:
            hearers = [one for one, _ in hearers_of[sender]]
            size = self.size + MASS_BYTES * self.algorithm.push_sum
            self.write(at[sender], "send", sender, *hearers, part=step, bytes=size * len(hearers))
            busiest = max([len(hearers), *(len(self.heard[step][hearer]) for hearer in hearers)])
            seconds = self.durations.transfer(busiest * size) + self.durations.latency(sender)
            self.sent_at[step, sender] = at[sender] + (seconds if hearers else 0.0)
            self.batches_sent[step, sender] = self.account.carried_now(sender)
        return dict(zip(workers, matrix.diagonal().tolist(), strict=True))

    def _graph(self, workers: int) -> MixingGraph:
        if workers not in self.graphs:
            self.graphs[workers] = self.algorithm.graph_of(workers)
        return self.graphs[workers]

    def _mix(self, own: dict[int, float]) -> None:
        """Let every living worker mix what it has with what it hears, which was sent `delay` rounds ago."""
        sent = self.steps - self.algorithm.delay
        heard = {one: [(sent, *pair) for pair in self.heard.get(sent, {}).get(one, [])] for one in own if one in self.free}
        self._mix_all(heard, own)
        self.account.forget_common(list(self.free))
        for key in [key for key in self.batches_sent if key[0] == sent]:
            del self.batches_sent[key], self.sent_at[key]
        self.heard.pop(sent, None)

    def _mix_all(self, heard: dict[int, list[tuple[int, int, float]]], own: dict[int, float]) -> None:
        """Let workers mix; who dies while it waits has sent what it learned, and mixes nothing.

        heard: by worker, (round, sender, weight).  own: the weight of what it has itself.
        """
        ready = {one: max([self.free[one], *(self.sent_at[key[:2]] for key in keys)]) for one, keys in heard.items()}
        for worker, keys in heard.items():
            for sent, sender, _ in keys:
                self.account.heard(worker, self.batches_sent[sent, sender])
        for worker, keys in heard.items():
            if not self._dies_before(worker, ready[worker]):
                self.free[worker] = ready[worker]
                weights, rounds = (own[worker], *(weight for *_, weight in keys)), tuple(sent for sent, *_ in keys)
                senders = (sender for _, sender, _ in keys)
                self.write(ready[worker], "mix", worker, *senders, part=self.steps, weights=weights, rounds=rounds)

    def last_agreement(self) -> None:
        """Take in what is still on its way, then average over all."""
        late = {
            one: [(sent, *pair) for sent, heard in sorted(self.heard.items()) for pair in heard.get(one, [])]
            for one in sorted(self.free)
        }
        self._mix_all({one: keys for one, keys in late.items() if keys}, dict.fromkeys(late, 1.0))
        self.heard.clear()
        self.average(sorted(self.free))
