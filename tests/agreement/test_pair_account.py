"""The account of workers that average in pairs, in random orders of messages and deaths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from widefield.agreement.pair_account import PairAccount
from widefield.agreement.serving import Shares

PLACES = 3


class World:
    """Workers as they are, beside an account that knows of them by messages alone.

    weights: by worker, how often each share is in its weights, as a set of (worker, number of the step, share).
    """

    def __init__(self, draw: random.Random, *, workers: int, steps: int) -> None:
        self.draw, self.workers = draw, workers
        self.shares = Shares(lambda step: range(PLACES), limit=steps)
        self.account = PairAccount(self.shares, range(workers))
        self.weights: dict[int, set] = {one: set() for one in range(workers)}
        self.has = {one: [0] * workers for one in range(workers)}
        self.ignores: dict[int, set[int]] = {one: set() for one in range(workers)}
        self.living = set(range(workers))
        self.does: dict[int, tuple[str, object]] = dict.fromkeys(range(workers), ("ask", None))
        self.offers: list[tuple[int, int, set, list[int]]] = []
        """(active, passive, weights, counts), on their way: they come even if the active one has died."""

    def act(self, worker: int) -> None:
        doing, what = self.does[worker]
        if doing == "ask":
            self.does[worker] = ("wait", None)
            self.account.asks(worker, self.has[worker])
            self.answer()
        elif doing == "offer":
            passive = self.draw.choice(range(1, self.workers, 2))
            if passive in self.living:
                self.offers.append((worker, passive, set(self.weights[worker]), list(self.has[worker])))
                self.does[worker] = ("reply", what)
            else:
                self.does[worker] = ("tell", what)
        elif doing == "tell":
            self.account.learns(worker)
            self.does[worker] = ("step", what)
        elif doing == "step":
            self.has[worker][worker] += 1
            self.weights[worker].add((worker, self.has[worker][worker], what))
            self.does[worker] = ("ask", None)

    def answer(self) -> None:
        for worker, share in self.account.ready():
            self.ignores[worker] |= self.account.dead
            first = "offer" if worker % 2 == 0 else "tell"
            self.does[worker] = ("ask", None) if share is None else (first, share)

    def deliver(self, number: int) -> None:
        """The passive one takes the mean and answers."""
        active, passive, weights, has = self.offers.pop(number)
        if passive not in self.living:
            if active in self.living:
                self.does[active] = ("tell", self.does[active][1])
            return
        if active in self.ignores[passive]:
            return
        self.weights[passive] |= weights
        self.has[passive] = [max(pair) for pair in zip(self.has[passive], has, strict=True)]
        if active in self.living:
            self.weights[active], self.has[active] = set(self.weights[passive]), list(self.has[passive])
            self.does[active] = ("tell", self.does[active][1])

    def kill(self, worker: int) -> None:
        self.living.discard(worker)
        self.account.goes(worker)
        self.answer()

    def choices(self) -> list[Callable[[], None]]:
        busy = [one for one in self.living if self.does[one][0] not in ("wait", "reply")]
        return [lambda one=one: self.act(one) for one in busy] + [lambda n=n: self.deliver(n) for n in range(len(self.offers))]


@pytest.mark.parametrize("seed", range(4))
def test_no_share_is_lost_or_in_the_weights_twice_whoever_dies(seed):
    """3,000 orders per seed, of 2 to 5 workers of which up to all but one die."""
    draw, seen = random.Random(seed), Counter()
    for _ in range(3000):
        workers = draw.randint(2, 5)
        world = World(draw, workers=workers, steps=draw.randint(1, 6))
        deaths = draw.randint(0, workers - 1)
        for _ in range(2000):
            if world.account.stands and not world.offers:
                break
            if deaths and draw.random() < 0.05:
                world.kill(draw.choice(sorted(world.living)))
                deaths -= 1
                continue
            choices = world.choices()
            assert choices, "nobody can go on, and nothing is on its way"
            draw.choice(choices)()
        else:
            raise AssertionError("the workers never stand")
        living = set().union(*(world.weights[one] for one in world.living))
        times = Counter(share for *_, share in living)
        assert times == {(step, place): 1 for step in range(world.shares.step) for place in range(PLACES)}
        seen[deaths == 0] += 1
    assert min(seen.values()) > 100
