"""Several servers, workers and the messages between them, in random orders and with random deaths, without processes."""

from __future__ import annotations

import random
from collections import deque

import pytest

from widefield.agreement import ParameterServer
from widefield.agreement.part_orders import PartOrders
from widefield.agreement.serving import Serving, Shares

KINDS = {
    "asynchronous": ParameterServer(),
    "synchronous": ParameterServer(kind="synchronous"),
    "backup 1": ParameterServer(kind="synchronous", backup=1),
    "bound 1": ParameterServer(bound=1),
    "max_staleness 2": ParameterServer(max_staleness=2),
}
WORKERS, FURTHER, STEPS = 3, 2, 4


class _Part:
    """A further server.  applied: the updates so far, each the gradients that it was made of; these are its weights too."""

    def __init__(self):
        self.orders, self.applied = PartOrders(), []

    def obey(self, order, *facts):
        if order == "read":
            self.orders.reads(*facts, len(self.applied))
        elif order == "update":
            self.applied.append(self.orders.takes(facts[0]))
        elif order == "drop":
            self.orders.drops(*facts)
        else:
            self.orders.strikes(facts[0], counted=facts[1])


class _Played:
    """Everybody, and what is on its way: `channels` by sender and hearer, each of which keeps its order."""

    def __init__(self, algorithm, draws, *, deaths):
        self.draws, self.deaths = draws, deaths
        self.places = algorithm.needed(WORKERS) if algorithm.backup else WORKERS
        shares = Shares(lambda step: range(self.places), limit=STEPS)
        self.serving = Serving(algorithm, shares, range(WORKERS))
        self.parts, self.applied, self.read = [_Part() for _ in range(FURTHER)], [], {}
        self.channels = {}
        self.living, self.waits = set(range(WORKERS)), {}  # by worker, for whose answers it waits
        self.share, self.versions = {}, {}
        for worker in self.living:
            self._fetch(worker, ("hello",))

    def send(self, sender, hearer, *message):
        self.channels.setdefault((sender, hearer), deque()).append(message)

    def order(self, *message):
        for part in range(FURTHER):
            self.send("first", part, *message)

    def _fetch(self, worker, message):
        """To the first server, and at the same time to all others, for weights."""
        self.waits[worker], self.versions[worker] = {"first", *range(FURTHER)}, {}
        self.send(("worker", worker), "first", *message)
        for part in range(FURTHER):
            self.send(("worker", worker), part, "fetch")

    # ---------------------------------------------------------------------------------------- what happens

    def play(self):
        while len(self.serving.shares.learned) < STEPS or not all(map(self.serving.shares.is_learned, range(STEPS))):
            ways = sorted((way for way, waiting in self.channels.items() if waiting), key=str)
            assert ways, f"nothing is on its way and {self.serving.shares.learned} is learned"
            if self.deaths and self.draws.random() < 0.05:
                self._die(self.draws.choice(sorted(self.living)))
            else:
                self._deliver(*self.draws.choice(ways))
        for part in self.parts:
            way = self.channels.get(("first", self.parts.index(part)), ())
            while way:
                part.obey(*way.popleft())

    def _die(self, worker):
        """What it has sent last is lost, on each channel as much as it happens; the first server hears of it at some time."""
        self.deaths -= 1
        self.living.discard(worker)
        for (sender, hearer), waiting in self.channels.items():
            if sender == ("worker", worker):
                for _ in range(self.draws.randrange(len(waiting) + 1)):
                    waiting.pop()
            if hearer == ("worker", worker):
                waiting.clear()
        self.send(("worker", worker), "first", "gone")

    def _deliver(self, sender, hearer):
        message = self.channels[sender, hearer].popleft()
        if hearer == "first":
            self._hear(sender[1], *message)
        elif sender == "first" and isinstance(hearer, int):
            self.parts[hearer].obey(*message)
            self._answer_fetches(hearer)
        elif isinstance(hearer, int):
            self._bring(hearer, sender[1], *message)
        elif hearer[1] in self.living:
            self._told(hearer[1], sender, *message)

    def _hear(self, worker, kind, *facts):
        """The first server hears of a worker."""
        serving = self.serving
        if kind == "gone":
            counted = [one.share for one in serving.held if one.worker == worker]
            serving.goes(worker)
            self.order("strike", worker, counted)
        elif kind == "hello":
            serving.joins(worker)
        elif serving.late.get(worker) == facts[0]:
            serving.drops_late(worker)
            self.order("drop", worker, facts[0])
        else:
            serving.pushes(worker, facts[0], (worker, facts[0]))
        for found in serving.due():
            self.applied.append([one.gradient for one in found])
            self.order("update", [(one.worker, one.share) for one in found])
        for reader, share in serving.ready():
            self.order("read", reader, share)
            if reader in self.living:
                self.send("first", ("worker", reader), "give", share, len(self.applied))

    def _bring(self, part, worker, kind, share=None):
        """A further server hears of a worker."""
        if kind == "fetch":
            self.parts[part].orders.asks(worker)
            self._answer_fetches(part)
        elif self.parts[part].orders.brings(worker, share, (worker, share)) and worker in self.living:
            self.send(part, ("worker", worker), "has")

    def _answer_fetches(self, part):
        for worker, share, version in self.parts[part].orders.ready():
            if worker in self.living:
                self.send(part, ("worker", worker), "state", share, version)

    def _told(self, worker, sender, kind, share=None, version=None):
        """A worker hears of a server.  Once it has all weights it brings its gradient, and pushes when all have that."""
        self.waits[worker].discard(sender)
        if kind != "has":
            self.versions[worker][sender] = share, version
        if self.waits[worker]:
            return
        if kind == "has":
            self._fetch(worker, ("push", self.share[worker]))
            return
        assert len(set(self.versions[worker].values())) == 1, f"weights of several versions: {self.versions[worker]}"
        self.share[worker], self.waits[worker] = share, set(range(FURTHER))
        for part in range(FURTHER):
            self.send(("worker", worker), part, "bring", share)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_all_servers_apply_the_same_gradients_in_one_order_or_none_whenever_a_worker_dies(name):
    died = 0
    for seed in range(1500):
        played = _Played(KINDS[name], random.Random(f"{name} {seed}"), deaths=seed % 3)
        played.play()
        died += WORKERS - len(played.living)
        learned = sorted(share for update in played.applied for _, share in update)
        assert learned == [(step, place) for step in range(STEPS) for place in range(played.places)]
        for part in played.parts:
            assert part.applied == played.applied
            assert not {worker for worker, _ in part.orders.brought} - played.living  # nothing of the dead is left
    assert died > 500


def test_a_server_takes_nothing_of_a_worker_that_was_struck_out():
    orders = PartOrders()
    assert orders.brings(0, (0, 0), "counted") and orders.brings(0, (0, 1), "not pushed")
    orders.strikes(0, counted=[(0, 0)])
    assert not orders.brings(0, (0, 2), "awake again") and orders.takes([(0, (0, 0))]) == ["counted"] and not orders.brought
    orders.asks(0)
    orders.reads(0, (0, 3), "weights")
    assert list(orders.ready()) == [] and orders.refused() == [0] and orders.refused() == []
