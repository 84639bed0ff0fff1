"""Ways that ought to be the same are: to 1e-12 in float64, with workers whose speeds differ from batch to batch.

Sums of 4 gradients in another order, over some hundred steps of a convex problem, differ by some 1e-15.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from agreeing import UNEVEN

from widefield.agreement import (
    AllReduce,
    DelayCompensation,
    Descent,
    Gossip,
    Objective,
    ParameterServer,
    PeriodicAveraging,
    Workers,
    digits,
    of_module,
    quadratic,
    simulate,
    slowmo,
)  # fmt: skip
from widefield.agreement.descent import DescentState
from widefield.agreement.sample_account import SampleAccount

SGD = Descent(0.1)


def small_mlp() -> Objective:
    """Two layers on the first 200 digits, by autograd."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.from_numpy(one[:200]) for one in load_digits(return_X_y=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10))
    return of_module(net, pixels / 16, labels.long(), torch.nn.functional.cross_entropy)


OBJECTIVES: dict[str, tuple[Callable[[], Objective], int, int]] = {
    "digits": (digits, 16, 1),
    "mlp": (small_mlp, 7, 2),  # 200 samples in batches of 7: the last one of an epoch has 4
    "quadratic": (quadratic, 4, 3),
}
"""By name: the objective, the batch of each worker, epochs."""


def one_process(objective: Objective, descent: Descent, workers: int, batch: int, epochs: int) -> torch.Tensor:
    """The weights of a plain loop: a step is of as many batches as there are workers, in the order of the account."""
    account, weights, seen = SampleAccount(objective.num_samples, epochs, batch, 0), objective.start, 0
    state = DescentState(descent)
    while samples := [sample for worker in range(workers) for sample in account.take(worker)]:
        account.taken.clear()
        gradient = objective.gradient(weights, [sample % objective.num_samples for sample in samples])
        weights = state.step(weights, gradient, descent.rate(seen=seen, count=len(samples)))
        seen += len(samples)
    return weights


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


SAME_AS_ONE_PROCESS = {
    "all-reduce": lambda descent: AllReduce(descent),
    "server": lambda descent: ParameterServer(descent, "synchronous"),
    "3 servers": lambda descent: ParameterServer(descent, "synchronous", servers=3),
    "local SGD of period 1": lambda descent: PeriodicAveraging(descent, 1),
    "DiLoCo of period 1 with rate 1": lambda descent: PeriodicAveraging(descent, 1, outer=Descent(1.0)),
    "SlowMo of period 1 without momentum": lambda descent: slowmo(1, descent, momentum=0.0),
    "post-local SGD that has not begun": lambda descent: PeriodicAveraging(descent, 5, start=10_000),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("algorithm", SAME_AS_ONE_PROCESS)
def test_synchronous_ways_are_one_process(algorithm, name):
    make, batch, epochs = OBJECTIVES[name]
    objective = make()
    run = simulate(SAME_AS_ONE_PROCESS[algorithm](SGD), objective, UNEVEN, epochs=epochs, batch=batch, points=1)
    close(run.weights, one_process(objective, SGD, 4, batch, epochs))


@pytest.mark.parametrize("name", ["digits", "quadratic"])
def test_gossip_on_the_complete_graph_is_an_all_reduce(name):
    """With equal batches: a mix counts workers, a reduction samples.  Digits are cut to 1,792, which 4 * 16 divides."""
    objective = digits(1792) if name == "digits" else quadratic()
    _, batch, epochs = OBJECTIVES[name]
    run = simulate(Gossip(SGD, "complete"), objective, UNEVEN, epochs=epochs, batch=batch, points=1)
    close(run.weights, simulate(AllReduce(SGD), objective, UNEVEN, epochs=epochs, batch=batch, points=1).weights)
    pushed = simulate(Gossip(SGD, "complete", push_sum=True), objective, UNEVEN, epochs=epochs, batch=batch, points=1)
    close(pushed.weights, run.weights)


@pytest.mark.parametrize(
    "descent",
    [
        Descent(0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
        Descent(0.01, kind="adamw"),
        Descent(lambda seen: 0.1 / (1 + seen / 100)),
    ],
    ids=["momentum", "adamw", "schedule"],
)
def test_servers_and_all_reduce_keep_the_optimizer_of_one_process(descent):
    expected = one_process(quadratic(), descent, 4, 4, 3)
    for algorithm in (AllReduce(descent), ParameterServer(descent, "synchronous", servers=3)):
        close(simulate(algorithm, quadratic(), UNEVEN, epochs=3, batch=4).weights, expected)


def test_a_schedule_by_samples_is_the_same_for_local_sgd_of_period_1():
    descent = Descent(lambda seen: 0.1 / (1 + seen / 100))
    run = simulate(PeriodicAveraging(descent, 1), quadratic(), UNEVEN, epochs=3, batch=4)
    close(run.weights, one_process(quadratic(), descent, 4, 4, 3))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", ["digits", "quadratic"])
def test_a_staleness_bound_of_0_is_synchronous(name, servers):
    """Four pushes with a quarter of the rate are one step with the mean.  Digits are cut to 1,792, which 4 * 16 divides."""
    objective = digits(1792) if name == "digits" else quadratic()
    _, batch, epochs = OBJECTIVES[name]
    bounded = ParameterServer(replace(SGD, lr_samples=4 * batch), bound=0, servers=servers)
    run = simulate(bounded, objective, UNEVEN, epochs=epochs, batch=batch, points=1)
    close(run.weights, one_process(objective, SGD, 4, batch, epochs))
    assert set(run.staleness) == {0, 1, 2, 3}, "updates of one step are applied one after another"


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_diloco_with_an_outer_rate_of_1_is_averaging(name, period):
    make, batch, epochs = OBJECTIVES[name]
    plain, outer = PeriodicAveraging(SGD, period), PeriodicAveraging(SGD, period, outer=Descent(1.0))
    runs = [simulate(algorithm, make(), UNEVEN, epochs=epochs, batch=batch, points=1) for algorithm in (plain, outer)]
    close(runs[0].weights, runs[1].weights)
    slow = simulate(slowmo(period, SGD, momentum=0.0), make(), UNEVEN, epochs=epochs, batch=batch, points=1)
    close(slow.weights, runs[0].weights)


def test_what_compensates_and_bounds_nothing_is_asynchronous_bit_for_bit():
    plain = ParameterServer(replace(SGD, lr_samples=16), servers=2)
    expected = simulate(plain, quadratic(), UNEVEN, epochs=5, batch=4)
    for changes in (
        {"compensation": DelayCompensation(0.0)}, {"compensation": DelayCompensation(0.0, decay=0.95)}, {"bound": 10**6},
    ):  # fmt: skip
        run = simulate(replace(plain, **changes), quadratic(), UNEVEN, epochs=5, batch=4)
        assert torch.equal(run.weights, expected.weights) and run.losses == expected.losses
    one = replace(plain, servers=1)
    limited = simulate(replace(one, max_staleness=10**6), quadratic(), UNEVEN, epochs=5, batch=4)
    assert torch.equal(limited.weights, simulate(one, quadratic(), UNEVEN, epochs=5, batch=4).weights)
    compensated = simulate(replace(plain, compensation=DelayCompensation(1.0)), quadratic(), UNEVEN, epochs=5, batch=4)
    assert not torch.equal(compensated.weights, expected.weights)


def test_one_worker_is_one_process_in_every_way():
    alone = Workers(1)
    expected = one_process(quadratic(), SGD, 1, 4, 2)
    algorithms = [
        AllReduce(SGD), PeriodicAveraging(SGD, 3), Gossip(SGD, "ring"), Gossip(SGD, push_sum=True, delay=1),
        ParameterServer(SGD, "synchronous"), ParameterServer(SGD, servers=3), ParameterServer(SGD, bound=0),
        ParameterServer(SGD, max_staleness=0), ParameterServer(SGD, "hogwild", servers=2),
    ]  # fmt: skip
    for algorithm in algorithms:
        close(simulate(algorithm, quadratic(), alone, epochs=2, batch=4).weights, expected)


def test_gradients_in_closed_form_are_those_of_autograd():
    for objective in (digits(50), quadratic()):
        weights = objective.start + 0.1
        samples = [1, 5, 7]
        shift = 1e-6 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        everything = list(range(objective.num_samples))
        rise = (objective.loss(weights + shift) - objective.loss(weights - shift)) / 2
        # Central difference: the next term is 1e-12 of the third derivative, rounding is 1e-16 of a loss of some units.
        assert rise == pytest.approx(float(objective.gradient(weights, everything) @ shift), rel=1e-6)
        parts = sum(objective.gradient(weights, [one]) for one in samples) / 3
        close(parts, objective.gradient(weights, samples))
