"""Ten thousand random schedules: a bound is never exceeded, nobody waits without end, and no update is lost."""

from collections import Counter

import pytest
import torch
from agreeing import EACH, random_workers

from widefield.agreement import Descent, EventLog, Objective, PairwiseGossip, ParameterServer, simulate_times
from widefield.agreement.measures import staleness_of
from widefield.agreement.peer_weights import PeerWeights

QUICK, ALL = range(1000), range(1000, 10_000)
SEEDS = pytest.mark.parametrize("seeds", [QUICK, pytest.param(ALL, marks=pytest.mark.sweep)], ids=["1000", "9000 more"])


def most_ahead(log: EventLog) -> int:
    """The most steps that a worker had done more than the slowest of those that still push, when it read a part."""
    left = Counter((event.part, event.workers[0]) for event in log.events if event.kind == "push")
    done, most = Counter(), 0
    for event in log.events:
        worker, part = event.workers[0], event.part
        if event.kind == "push":
            done[part, worker] += 1
            left[part, worker] -= 1
        elif event.kind == "read":
            slowest = min([done[key] for key, times in left.items() if times and key[0] == part], default=done[part, worker])
            most = max(most, done[part, worker] - slowest)
    return most


@SEEDS
def test_no_worker_is_ever_further_ahead_than_the_bound(seeds):
    reached = Counter()
    for seed in seeds:
        bound, workers = seed % 4, random_workers(seed)
        algorithm = ParameterServer(EACH, bound=bound, servers=1 + seed % 2)
        log = simulate_times(algorithm, workers, num_samples=12 + 4 * (seed % 3), numel=4, batch=1, seed=seed)
        most, stalest = most_ahead(log), max(staleness_of(log))
        # Between a worker's read at step c and its push, another one, at c - bound or later, gets to c + bound + 1 at most.
        assert most <= bound and stalest <= (workers.count - 1) * (2 * bound + 1), f"seed {seed}"
        reached[most == bound] += 1
    assert reached[True] > 0.5 * len(seeds), "a bound that is seldom reached is not tested"


@SEEDS
def test_no_gradient_is_ever_staler_than_the_limit(seeds):
    reached = Counter()
    for seed in seeds:
        most, workers = seed % 7, random_workers(seed, dying=seed % 5 == 0)
        log = simulate_times(
            ParameterServer(EACH, max_staleness=most), _not_all_die(workers), num_samples=16, numel=4, batch=1, seed=seed
        )
        stalest = max(staleness_of(log))
        assert stalest <= most, f"seed {seed}"
        reached[stalest == most] += 1
    assert reached[True] > 0.5 * len(seeds)


def _not_all_die(workers):
    """`random_workers` lets at least one live on."""
    assert len({death.worker for death in workers.deaths}) < workers.count
    return workers


def whole_numbers() -> Objective:
    """The gradient of sample s is -2^20 s for weight 0: sums of 12 of them, halved 20 times, are exact in float64."""

    def gradient(weights: torch.Tensor, samples) -> torch.Tensor:
        return torch.tensor([-float(2**20 * sum(samples)) / len(samples)], dtype=torch.float64)

    return Objective(torch.zeros(1, dtype=torch.float64), 12, gradient, lambda weights: float(weights[0]))


@SEEDS
def test_pairs_never_wait_without_end_and_lose_no_update(seeds):
    """Every average keeps the sum of all weights, so before the last one it is the sum of all updates, bit for bit."""
    objective, algorithm = whole_numbers(), PairwiseGossip(Descent(1.0))
    for seed in seeds:
        workers = random_workers(seed)
        log = simulate_times(algorithm, workers, num_samples=12, numel=1, batch=1, seed=seed)
        kinds = Counter(event.kind for event in log.events)
        assert kinds["gradient"] == kinds["step"] == 12 and kinds["offer"] == kinds["pair"], f"seed {seed}"
        peers = PeerWeights(algorithm, objective, workers.count)
        for event in log.events[:-1]:
            peers.apply(event)
        assert sum(float(one.weights[0]) for one in peers.replicas.values()) == 2**20 * sum(range(12)), f"seed {seed}"
