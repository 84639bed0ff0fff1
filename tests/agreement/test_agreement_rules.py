"""The rules of each algorithm, one by one, against torch's optimizers and formulas written out."""

import random

import pytest
import torch

from widefield.agreement import (
    DelayCompensation,
    Descent,
    Gossip,
    PairwiseGossip,
    ParameterServer,
    PeriodicAveraging,
    SlowMomentum,
)
from widefield.agreement.all_reduce import all_reduce_bytes, weighted_mean
from widefield.agreement.descent import DescentState
from widefield.agreement.gossip import PushSum, pairwise_mean, push_sum
from widefield.agreement.mixing import GRAPHS, MixingGraph, mixed, of_edges, ring
from widefield.agreement.periodic import hierarchical, local_sgd, outer_step, post_local_sgd, slow_momentum_step
from widefield.agreement.server import (
    ServerPart,
    StalenessClocks,
    StalenessLimit,
    adaptive_strength,
    delay_compensated,
    even_parts,
    joined,
)  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (Descent(0.1), lambda one: torch.optim.SGD([one], 0.1)),
        (
            Descent(0.1, momentum=0.9, weight_decay=0.01),
            lambda one: torch.optim.SGD([one], 0.1, momentum=0.9, weight_decay=0.01),
        ),
        (Descent(0.1, momentum=0.9, nesterov=True), lambda one: torch.optim.SGD([one], 0.1, momentum=0.9, nesterov=True)),
        (Descent(0.1, kind="adamw", weight_decay=0.02), lambda one: torch.optim.AdamW([one], 0.1, weight_decay=0.02)),
    ],
)
def test_steps_are_those_of_torch(options, reference):
    weights, leaf = numbers(3, 4), numbers(3, 4).requires_grad_()
    state, optimizer = DescentState(options), reference(leaf)
    for step in range(5):
        gradient = numbers(3, 4, seed=step + 1)
        before = weights.clone()
        new = state.step(weights, gradient, 0.1)
        assert torch.equal(weights, before), "the given weights stay"
        leaf.grad, weights = gradient, new
        optimizer.step()
        torch.testing.assert_close(weights, leaf.detach(), rtol=0, atol=1e-12)


def test_a_learning_rate_goes_by_samples():
    falls = Descent(lambda seen: 1 / (1 + seen), lr_samples=32)
    assert falls.rate(seen=3, count=8) == 0.25 * 8 / 32 and Descent(0.5).rate(seen=9, count=8) == 0.5


def test_a_copied_state_goes_on_alike_and_apart():
    state, weights, gradient = DescentState(Descent(0.1, momentum=0.9)), numbers(4), numbers(4, seed=1)
    weights = state.step(weights, gradient, 0.1)
    copy = state.copy()
    assert torch.equal(copy.step(weights, gradient, 0.1), state.step(weights, gradient, 0.1))
    copy.step(weights, gradient, 0.1)
    assert (copy.steps, state.steps) == (3, 2)


def test_a_mean_counts_samples():
    a, b = numbers(3), numbers(3, seed=1)
    torch.testing.assert_close(weighted_mean([a, b], [1, 3]), (a + 3 * b) / 4, rtol=0, atol=1e-15)
    assert all_reduce_bytes(4, 100) == 600 and all_reduce_bytes(1, 100) == 0


def test_the_outer_steps_are_their_formulas():
    agreed, mean, later = numbers(5), numbers(5, seed=1), numbers(5, seed=2)
    options = SlowMomentum(rate=0.8, momentum=0.6)
    first, velocity = slow_momentum_step(agreed, mean, None, options, 0.1)
    torch.testing.assert_close(first, agreed - 0.8 * (agreed - mean), rtol=0, atol=1e-14)
    second, _ = slow_momentum_step(first, later, velocity, options, 0.2)
    expected = first - 0.8 * 0.2 * (0.6 * (agreed - mean) / 0.1 + (first - later) / 0.2)
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-14)
    nesterov = DescentState(Descent(0.7, momentum=0.9, nesterov=True))
    torch.testing.assert_close(
        outer_step(agreed, mean, nesterov, 0.7), agreed - 0.7 * 1.9 * (agreed - mean), rtol=0, atol=1e-14
    )


def test_who_averages_after_which_step():
    assert [local_sgd(3).averages_after(step, 4) for step in range(1, 7)] == [1, 1, 4, 1, 1, 4]
    assert [post_local_sgd(3, 2).averages_after(step, 4) for step in range(1, 7)] == [4, 4, 1, 1, 4, 1]
    grouped = hierarchical(8, ((2, 2), (4, 4)))
    assert [grouped.averages_after(step, 16) for step in range(1, 9)] == [1, 2, 1, 4, 1, 2, 1, 16]
    assert [PeriodicAveraging(period=2, start=2, outer=Descent(1.0)).has_outer_step(step) for step in (1, 2, 3, 4)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_push_sum_finds_the_mean_on_a_directed_graph_and_keeps_its_masses():
    (matrix,) = of_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)], directed=True).matrices
    held = [PushSum(numbers(3, seed=one)) for one in range(4)]
    mean = torch.stack([one.value for one in held]).mean(0)
    for _ in range(200):
        held = [push_sum(held, row.tolist()) for row in matrix]
        assert sum(one.mass for one in held) == pytest.approx(4, abs=1e-12)
    for one in held:
        torch.testing.assert_close(one.weights, mean, rtol=0, atol=1e-12)
    assert max(one.mass for one in held) > 1.1, "a plain mix would have been biased"


def test_a_mix_and_a_pair_are_sums():
    a, b = numbers(3), numbers(3, seed=1)
    torch.testing.assert_close(mixed([a, b], [0.25, 0.75]), 0.25 * a + 0.75 * b, rtol=0, atol=0)
    assert torch.equal(pairwise_mean(a, b), pairwise_mean(b, a))


def test_the_sides_of_a_bipartite_graph():
    assert PairwiseGossip().partners(4) == {0: (1, 3), 2: (1, 3)}
    assert PairwiseGossip(graph=ring).partners(4) == {0: (1, 3), 2: (1, 3)}
    assert PairwiseGossip().partners(1) == {0: ()}


def test_delay_compensation_is_its_formula():
    g, now, then = numbers(4), numbers(4, seed=1), numbers(4, seed=2)
    torch.testing.assert_close(delay_compensated(g, now, then, 0.3), g + 0.3 * g * g * (now - then), rtol=0, atol=1e-15)
    strength, square = adaptive_strength(g, None, DelayCompensation(2.0, decay=0.95))
    torch.testing.assert_close(square, 0.05 * g * g, rtol=1e-12, atol=0)
    torch.testing.assert_close(strength, 2.0 / (0.05 * g * g + 1e-7).sqrt(), rtol=1e-12, atol=0)
    _, later = adaptive_strength(now, square, DelayCompensation(2.0, decay=0.95))
    torch.testing.assert_close(later, 0.95 * square + 0.05 * now * now, rtol=1e-12, atol=0)


def test_a_part_counts_versions_and_staleness():
    part = ServerPart(numbers(3), DescentState(Descent(0.1)))
    then = part.weights
    assert [part.push(numbers(3), 0.1, then=then, version=0) for _ in range(3)] == [0, 1, 2]
    assert (part.version, part.staleness) == (3, [0, 1, 2])
    with pytest.raises(ValueError, match="gradient of version 4 comes to a server at version 3"):
        part.push(numbers(3), 0.1, then=then, version=4)


def test_servers_hold_all_parameters_once():
    for numel, servers in ((7, 3), (8, 8), (10, 1)):
        assert torch.equal(joined(numbers(numel)[part] for part in even_parts(numel, servers)), numbers(numel))
    weights = numbers(7)
    parts = ParameterServer(servers=3).parts_of(weights)
    assert [part.weights.numel() for part in parts] == [3, 2, 2]
    assert torch.equal(joined(part.weights for part in parts), weights)


def test_clocks_let_nobody_be_too_far_ahead():
    clocks = StalenessClocks(bound=1)
    clocks.enter(0)
    clocks.enter(1)
    clocks.advance(0)
    assert clocks.may_read(0)
    clocks.advance(0)
    assert not clocks.may_read(0) and clocks.ahead(0) == 2 and clocks.may_read(1)
    clocks.leave(1)
    assert clocks.may_read(0)
    clocks.enter(2)
    assert clocks.clocks[2] == 2, "who comes later is as far as the slowest"
    clocks.advance(1)
    assert 1 not in clocks.clocks


def in_time_without(limit: StalenessLimit, key: tuple[int, int]) -> bool:
    """Whether all other open ones can still be applied in time once this one was, the oldest first."""
    others = sorted(version for one, version in limit.open.items() if one != key)
    return all(limit.version + 1 + place - version <= limit.most for place, version in enumerate(others))


def test_a_limit_is_never_exceeded_and_never_stops_all():
    for seed in range(300):
        generator = random.Random(seed)
        limit, held, worst = StalenessLimit(most=generator.randrange(6)), set(), 0
        for step in range(60):
            free = [(one, 0) for one in range(5) if (one, 0) not in limit.open]
            if free and limit.may_read() and generator.random() < 0.5:
                limit.read(generator.choice(free))
            may = [key for key in limit.open if limit.may_push(key)]
            assert bool(may) == bool(limit.open), f"all wait: seed {seed}, step {step}"
            assert may == [key for key in limit.open if in_time_without(limit, key)]
            if may and generator.random() < 0.5:
                key = generator.choice(may)
                worst = max(worst, limit.version - limit.open[key])
                limit.push(key)
        assert worst <= limit.most and not held
    limit.forget((9, 9))


def not_of(workers: int) -> MixingGraph:
    return GRAPHS["ring"](workers + 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Descent(kind="lion"), "kind 'lion'"),
        (lambda: Descent(momentum=1.0), "momentum of 1.0"),
        (lambda: Descent(nesterov=True), "Nesterov"),
        (lambda: Descent(kind="adamw", momentum=0.9), "AdamW takes betas"),
        (lambda: Descent(lr_samples=0), "for 0 samples"),
        (lambda: Descent(float("nan")).rate(seen=0, count=1), "after 0 samples is nan"),
        (lambda: Descent(lambda seen: -1.0).rate(seen=1000, count=1), "after 1,000 samples is -1.0"),
        (lambda: weighted_mean([numbers(2)], [0]), "0 samples in all"),
        (lambda: SlowMomentum(momentum=1.0), "momentum 1.0"),
        (lambda: SlowMomentum(rate=0.0), "rate 0.0"),
        (lambda: slow_momentum_step(numbers(2), numbers(2), None, SlowMomentum(), 0.0), "learning rate, which is 0.0"),
        (lambda: local_sgd(0), "period of 0 steps"),
        (lambda: post_local_sgd(2, -1), "after -1"),
        (lambda: hierarchical(4, ((4, 2),)), "every 4 steps, where all do every 4"),
        (lambda: hierarchical(4, ((2, 1),)), "groups of 1 workers"),
        (lambda: Gossip(graph="star"), "'star'; there are ring"),
        (lambda: Gossip(delay=1), "delay of 1 mixes"),
        (lambda: Gossip(delay=-1, push_sum=True), "delay of -1 mixes"),
        (lambda: Gossip(push_sum=True, delay=1, global_period=4), "1 steps on their way"),
        (lambda: Gossip(global_period=0), "every 0 steps"),
        (lambda: Gossip(push_sum=True, combines_first=True), "push-sum takes its step before"),
        (lambda: Gossip(graph=lambda n: of_edges(n, [(0, 1)], directed=True)).graph_of(3), "does not keep the mean"),
        (lambda: Gossip(graph=not_of).graph_of(3), "of 4 workers and 3 are alive"),
        (lambda: PairwiseGossip(graph=ring).partners(5), "circle of odd length"),
        (lambda: PairwiseGossip(graph=lambda n: of_edges(n, [(0, 1)])).partners(3), "worker 2"),
        (lambda: DelayCompensation(-1.0), "strength -1.0"),
        (lambda: DelayCompensation(1.0, decay=1.0), "decay 1.0"),
        (lambda: ParameterServer(kind="lazy"), "kind 'lazy'"),
        (lambda: ParameterServer(backup=1), "backup=1"),
        (lambda: ParameterServer(kind="synchronous", backup=-1), "backup=-1"),
        (lambda: ParameterServer(kind="synchronous", bound=1), "bound=1"),
        (lambda: ParameterServer(bound=-1), "bound=-1"),
        (lambda: ParameterServer(max_staleness=-1), "max_staleness=-1"),
        (lambda: ParameterServer(kind="hogwild", max_staleness=2), "max_staleness=2"),
        (lambda: ParameterServer(bound=1, max_staleness=2), "both say who waits"),
        (lambda: ParameterServer(servers=2, max_staleness=2), "on 2 servers"),
        (lambda: ParameterServer(kind="hogwild", compensation=DelayCompensation(1.0)), "compensates no delay"),
        (lambda: ParameterServer(Descent(momentum=0.9), "hogwild"), "plain SGD"),
        (lambda: ParameterServer(kind="synchronous", backup=3).needed(3), "3 backup workers of 3"),
        (lambda: even_parts(3, 4), "3 parameters on 4 servers"),
        (lambda: even_parts(3, 0), "3 parameters on 0 servers"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
