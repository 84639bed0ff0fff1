"""What holds of every simulated run: each sample once, bytes by formula, the same bits again, times reckoned by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from agreeing import ALGORITHMS, BATCH, EACH, SGD, UNEVEN, random_workers

from widefield.agreement import (
    AllDiedError,
    AllReduce,
    Connection,
    Death,
    Delay,
    Descent,
    EventLog,
    Gossip,
    Objective,
    PairwiseGossip,
    ParameterServer,
    PeriodicAveraging,
    Workers,
    digits,
    of_module,
    quadratic,
    replay,
    simulate,
    simulate_times,
)  # fmt: skip
from widefield.agreement.events import Event, EventQueue
from widefield.agreement.gossip import MASS_BYTES
from widefield.agreement.mixing import GRAPHS, MixingGraph, of_edges
from widefield.agreement.peer_weights import PeerWeights
from widefield.agreement.sample_account import SampleAccount, times_learned
from widefield.agreement.server_weights import ServerWeights

SIZE = 8 * 8
"""Bytes of the quadratic's weights."""


def run_of(name: str, workers: Workers = UNEVEN, *, epochs: int = 2, seed: int = 0, num_samples: int = 64):
    return simulate(ALGORITHMS[name], quadratic(num_samples), workers, epochs=epochs, batch=BATCH, seed=seed)


def lowest_loss(num_samples: int) -> float:
    """The loss at the minimum: 200 steps down the whole gradient, whose Hessian is near the identity."""
    objective = quadratic(num_samples)
    weights = objective.start
    for _ in range(200):
        weights = weights - 0.5 * objective.gradient(weights, range(num_samples))
    assert float(objective.gradient(weights, range(num_samples)).norm()) < 1e-6
    return objective.loss(weights)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_way_learns_each_sample_once_and_lowers_the_loss(name):
    run = run_of(name, epochs=6, num_samples=62)
    assert run.learned == Counter(dict.fromkeys(range(6 * 62), 1))
    best, start = lowest_loss(62), quadratic(62).loss(quadratic(62).start)
    assert run.losses[-1].loss - best < 0.7 * (start - best)
    assert run.losses[-1].distance <= 1e-12 and run.losses[-1].samples == 6 * 62
    assert [one.seconds for one in run.losses] == sorted(one.seconds for one in run.losses)
    assert run.samples_per_second == 6 * 62 / run.seconds


def test_digits_are_learned():
    objective = digits()
    run = simulate(ParameterServer(Descent(0.5, lr_samples=64)), objective, UNEVEN, epochs=5, batch=16, points=1)
    assert objective.accuracy(objective.start) < 0.2 and objective.accuracy(run.weights) > 0.9


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_replayed_from_its_log_bit_for_bit(name):
    for seed in range(5):
        workers = random_workers(seed, count=4, dying=seed > 2 and name != "pairwise")
        run = run_of(name, workers, seed=seed)
        again = replay(EventLog.from_text(run.log.to_text()), ALGORITHMS[name], quadratic())
        assert again.log == run.log and torch.equal(again.weights, run.weights) and again.losses == run.losses
        assert (again.staleness, again.idle_seconds, again.bytes_sent) == (run.staleness, run.idle_seconds, run.bytes_sent)


@pytest.mark.parametrize("name", ["all_reduce", "pairwise", "asynchronous", "push_sum"])
def test_a_seed_gives_one_run_and_another_seed_another(name):
    assert run_of(name, seed=3).log == run_of(name, seed=3).log != run_of(name, seed=4).log


# ---------------------------------------------------------------------------------------------- bytes


def counts(log: EventLog) -> Counter[str]:
    return Counter(event.kind for event in log.events)


@pytest.mark.parametrize("name", ["asynchronous", "bounded", "bounded_delay", "synchronous", "compensated_adaptive"])
def test_servers_send_the_weights_twice_per_gradient_and_once_more_to_each_worker(name):
    run = run_of(name)
    gradients = 2 * 64 // BATCH
    reads = counts(run.log)["read"] / ALGORITHMS[name].servers
    assert run.bytes_sent == (gradients + reads) * SIZE
    if name in ("asynchronous", "synchronous", "compensated_adaptive"):
        assert run.bytes_sent == (2 * gradients + 4) * SIZE


def test_ways_without_servers_send_what_their_formulas_say():
    steps, ring_reduce = 2 * 64 // BATCH // 4, 2 * 3 * SIZE
    assert run_of("all_reduce").bytes_sent == steps * ring_reduce
    assert run_of("local_sgd").bytes_sent == steps // 4 * ring_reduce
    assert run_of("diloco").bytes_sent == (steps // 3 + 1) * ring_reduce, "the last two steps are averaged too"
    of_groups = {2: 2 * (2 * 1 * SIZE), 4: 2 * (2 * 1 * SIZE), 6: ring_reduce, 8: 2 * (2 * 1 * SIZE)}
    assert run_of("hierarchical").bytes_sent == sum(of_groups.values()) + ring_reduce
    assert run_of("gossip_ring").bytes_sent == steps * 4 * 2 * SIZE + ring_reduce
    assert run_of("gossip_global").bytes_sent == 6 * 4 * 2 * SIZE + 2 * ring_reduce + ring_reduce
    assert run_of("push_sum").bytes_sent == steps * 4 * (SIZE + MASS_BYTES) + ring_reduce
    pairs = counts(run_of("pairwise").log)["pair"]
    assert run_of("pairwise").bytes_sent == pairs * 2 * SIZE + ring_reduce
    assert run_of("hogwild").bytes_sent == 0


@pytest.mark.parametrize("graph", list(GRAPHS))
def test_gossip_sends_one_message_per_edge(graph):
    log = simulate_times(Gossip(SGD, graph), Workers(8), num_samples=64, numel=100, itemsize=4, batch=4)
    known = GRAPHS[graph](8)
    assert sum(event.bytes for event in log.events) == 400 * (known.messages_at(0) + known.messages_at(1) + 2 * 7)


# ---------------------------------------------------------------------------------------------- times


def test_times_of_a_straggler_are_those_reckoned_by_hand():
    """Three workers take 1 s for a batch and one takes 5; messages take no time.  32 batches in all."""
    workers = Workers(4, slow={3: 5.0})
    together = simulate_times(AllReduce(SGD), workers, num_samples=32, numel=10, batch=1)
    assert together.seconds == 8 * 5
    apart = simulate_times(ParameterServer(EACH), workers, num_samples=32, numel=10, batch=1)
    assert apart.seconds == 10, "32 batches at 3.2 per second"
    by_worker = Counter(event.workers[0] for event in apart.events if event.kind == "gradient")
    assert by_worker == {0: 10, 1: 10, 2: 10, 3: 2}


def test_idle_time_is_what_a_worker_waits():
    run = simulate(AllReduce(SGD), quadratic(32), Workers(4, slow={3: 5.0}), batch=1)
    assert run.idle_seconds == (8 * 4, 8 * 4, 8 * 4, 0)
    run = simulate(ParameterServer(EACH), quadratic(32), Workers(4, slow={3: 5.0}), batch=1)
    assert run.idle_seconds == (0, 0, 0, 0)


def test_messages_take_latency_and_bandwidth():
    connection = Connection(Delay(0.5), 100.0)
    reduced = simulate_times(AllReduce(SGD), Workers(4, connection=connection), num_samples=4, numel=50, batch=1)
    assert reduced.seconds == 1 + 6 * (0.5 + 400 / 4 / 100)
    served = simulate_times(ParameterServer(SGD), Workers(1, connection=connection), num_samples=1, numel=50, batch=1)
    assert served.seconds == 4.5 + 1 + 4.5
    crowded = simulate_times(ParameterServer(SGD), Workers(2, connection=connection), num_samples=2, numel=50, batch=1)
    assert crowded.seconds == 8.5 + 1 + 4.5, "the server sends to one after the other"
    divided = simulate_times(
        ParameterServer(SGD, servers=2), Workers(2, connection=connection), num_samples=2, numel=50, batch=1
    )
    assert divided.seconds < crowded.seconds
    pair = simulate_times(PairwiseGossip(SGD), Workers(2, connection=connection), num_samples=2, numel=50, batch=1)
    assert pair.seconds == 1 + 4.5 + 2 * (0.5 + 400 / 2 / 100)


SLOW = Workers(4, Delay(1.0, "lognormal", 0.1), slow={3: 5.0}, connection=Connection(Delay(0.005, "exponential"), 1e7))


def speed(algorithm, epochs: int = 4) -> float:
    log = simulate_times(algorithm, SLOW, num_samples=1797, numel=650, epochs=epochs)
    return 1797 * epochs / log.seconds


@pytest.mark.parametrize(
    "algorithm",
    [
        ParameterServer(EACH),
        PairwiseGossip(SGD),
        ParameterServer(EACH, max_staleness=16),
        ALGORITHMS["compensated"],
        ALGORITHMS["hogwild"],
    ],
    ids=["asynchronous", "pairwise", "bounded delay", "compensated", "hogwild"],
)
def test_a_worker_five_times_slower_costs_asynchronous_ways_little(algorithm):
    """3.2 batches per second in place of 0.8, less what messages and the end cost."""
    assert speed(algorithm) >= 2.2 * speed(ParameterServer(SGD, "synchronous"))


def test_a_bound_in_steps_lets_workers_be_ahead_and_then_waits_for_the_slow_one():
    """With `bound` s the fast ones gain s steps once; a run that is long against s goes at the pace of the slowest."""
    together = speed(ParameterServer(SGD, "synchronous"), epochs=1)
    assert speed(ParameterServer(EACH, bound=24), epochs=1) >= 2.2 * together
    assert speed(ParameterServer(EACH, bound=4), epochs=4) <= 1.1 * together


# ---------------------------------------------------------------------------------------------- staleness


@pytest.mark.parametrize("name", ["asynchronous", "bounded", "bounded_delay", "compensated", "hogwild"])
def test_staleness_in_the_log_is_what_the_servers_record(name):
    run = run_of(name)
    weights = ServerWeights(ALGORITHMS[name], quadratic(), 4)
    for event in run.log.events:
        weights.apply(event)
    assert Counter(one for part in weights.parts for one in part.staleness) == run.staleness
    assert run.staleness.total() == 2 * 64 // BATCH * ALGORITHMS[name].servers
    assert run.staleness[1] > 0, "else nothing was asynchronous"


# ---------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("name", ALGORITHMS)
def test_whoever_dies_no_sample_is_lost_or_learned_twice(name):
    ended = deaths = 0
    for seed in range(40):
        try:
            log = simulate_times(
                ALGORITHMS[name],
                random_workers(seed, count=4, dying=True),
                num_samples=62,
                numel=8,
                epochs=2,
                batch=BATCH,
                seed=seed,
            )
        except AllDiedError:
            continue
        ended += 1
        assert times_learned(log) == Counter(dict.fromkeys(range(124), 1)), f"seed {seed}"
        deaths += counts(log)["die"]
    assert ended >= 20 and deaths >= ended


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_worker_that_comes_back_learns_again(name):
    workers = Workers(4, connection=Connection(Delay(0.01), 1e5), deaths=(Death(1, 2.5, back=6.2),))
    run = simulate(ALGORITHMS[name], quadratic(), workers, epochs=3, batch=BATCH)
    assert set(run.learned.values()) == {1} and run.learned.total() == 3 * 64
    (joined,) = [event.time for event in run.log.events if event.kind == "join"]
    after = [event for event in run.log.events if event.kind == "gradient" and event.time > joined and event.workers[0] == 1]
    between = [event for event in run.log.events if event.kind == "gradient" and 2.5 < event.time < joined]
    assert after and between and all(event.workers[0] != 1 for event in between)


def each_sample_moves_its_weight(num_samples: int) -> Objective:
    """The gradient of sample s is -1 for weight s, whatever the weights are: weights count how often a sample was learned."""

    def gradient(weights: torch.Tensor, samples) -> torch.Tensor:
        return -torch.nn.functional.one_hot(torch.tensor(samples), num_samples).double().sum(0) / len(samples)

    return Objective(
        torch.zeros(num_samples, dtype=torch.float64), num_samples, gradient, lambda weights: -float(weights.sum())
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        ParameterServer(Descent(1.0, lr_samples=1), "synchronous", servers=2, backup=1),
        ParameterServer(Descent(1.0, lr_samples=1), servers=3),
        ParameterServer(Descent(1.0, lr_samples=1), bound=1, servers=2),
        ParameterServer(Descent(1.0, lr_samples=1), max_staleness=4),
        ParameterServer(Descent(1.0, lr_samples=1), "hogwild", servers=5),
        AllReduce(Descent(1.0, lr_samples=1)),
    ],
)
def test_the_weights_say_too_that_each_sample_was_learned_once_whoever_died(algorithm):
    for seed in range(12):
        workers = random_workers(seed, count=4, dying=True)
        try:
            run = simulate(algorithm, each_sample_moves_its_weight(30), workers, epochs=3, batch=BATCH, seed=seed, points=1)
        except AllDiedError:
            continue
        torch.testing.assert_close(run.weights, torch.full((30,), 3.0, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "deaths", "words"),
    [
        (AllReduce(SGD), [Death(one, 1.5) for one in range(4)], "the last worker that lived died, with 48 samples left"),
        (AllReduce(SGD), [Death(one, 1.5, back=3.0) for one in range(4)], "the last worker that lived died"),
        (ParameterServer(SGD), [Death(one, 1.5) for one in range(4)], "the last worker died, with 48 samples left"),
        (PairwiseGossip(SGD), [Death(1, 1.5), Death(3, 1.5)], "no living partner"),
        (PairwiseGossip(SGD), [Death(0, 1.5), Death(2, 1.5)], "only passive workers"),
        (PairwiseGossip(SGD), [Death(one, 1.5, back=2.5) for one in (0, 1)], "no peer lives"),
    ],
)
def test_when_nobody_is_left_the_error_says_so(algorithm, deaths, words):
    count = 2 if "no peer" in words else 4
    with pytest.raises(AllDiedError, match=words):
        simulate(algorithm, quadratic(64), Workers(count, deaths=tuple(deaths)), batch=BATCH)


def test_servers_outlive_all_workers_and_go_on_with_those_that_come_back():
    workers = Workers(2, deaths=(Death(0, 1.5, back=4.0), Death(1, 1.5)))
    run = simulate(ParameterServer(SGD), quadratic(64), workers, batch=BATCH)
    assert set(run.learned.values()) == {1} and run.seconds > 4


# ---------------------------------------------------------------------------------------------- masses


def one_way(workers: int) -> MixingGraph:
    """A circle in one direction with a chord, on which a plain mix is biased."""
    return of_edges(workers, [*((one, (one + 1) % workers) for one in range(workers)), (0, 2)], directed=True)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_masses_sum_to_the_workers_once_all_messages_are_there(delay):
    algorithm = Gossip(SGD, one_way, push_sum=True, delay=delay)
    run = simulate(algorithm, quadratic(), UNEVEN, epochs=2, batch=BATCH)
    peers = PeerWeights(algorithm, quadratic(), 4)
    last_mix = max(place for place, event in enumerate(run.log.events) if event.kind == "mix")
    for event in run.log.events[: last_mix + 1]:
        peers.apply(event)
    masses = [one.held.mass for one in peers.replicas.values()]
    assert sum(masses) == pytest.approx(4, abs=1e-12) and max(masses) > 1.05


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: simulate("gossip", quadratic(), Workers(2)), "'gossip' is no way to agree"),
        (lambda: simulate(AllReduce(), quadratic(), Workers(2), batch=0), "batches of 0"),
        (lambda: simulate(AllReduce(), quadratic(), Workers(2), epochs=0), "0 epochs"),
        (lambda: simulate(ParameterServer(kind="synchronous", backup=2), quadratic(), Workers(2)), "leave none to wait for"),
        (lambda: simulate(ParameterServer(servers=9), quadratic(), Workers(2)), "8 parameters on 9 servers"),
        (lambda: replay(run_of("pairwise").log, ALGORITHMS["all_reduce"], quadratic()), "the log is of PairwiseGossip"),
        (
            lambda: replay(run_of("pairwise").log, ALGORITHMS["pairwise"], quadratic(65)),
            "64 samples and 8 weights, and the objective",
        ),
        (lambda: Workers(0), "a run of 0 workers"),
        (lambda: Workers(2, slow={2: 2.0}), "worker 2 is slow or dies"),
        (lambda: Workers(2, slow={1: 0.0}), "0.0 times slower"),
        (lambda: Workers(2, deaths=(Death(5, 1.0),)), "worker 5 is slow or dies"),
        (lambda: Workers(2, deaths=(Death(1, 2.0, back=1.0),)), "comes back at 1.0 s"),
        (lambda: Workers(2, deaths=(Death(1, 2.0), Death(1, 3.0))), "alive from inf s"),
        (lambda: Workers(2, deaths=(Death(1, -1.0),)), "dies at -1.0 s"),
        (lambda: Delay(1.0, "normal"), "'normal'; take constant"),
        (lambda: Delay(-1.0), "-1.0 s"),
        (lambda: Delay(1.0, "uniform", 2.0), "below 0"),
        (lambda: Connection(bytes_per_second=0.0), "0.0 bytes per second"),
        (lambda: EventLog.from_text(""), "not a log of a simulation"),
        (lambda: EventLog.from_text('{"algorithm": 1}'), "not a log of a simulation"),
        (lambda: Event.from_json("[1]"), "not an event of a log"),
        (lambda: Event.from_json('{"time": 1.0, "kind": "nap", "workers": []}'), "kind 'nap'"),
        (lambda: PeerWeights(AllReduce(), quadratic(), 2).apply(Event(0.0, "push", (0,))), "kind push in the log of AllReduce"),
        (lambda: ServerWeights(ParameterServer(), quadratic(), 2).apply(Event(0.0, "mix", (0,))), "kind mix in the log"),
        (lambda: digits(2000), "2000 of scikit-learn's digits"),
        (
            lambda: of_module(torch.nn.BatchNorm1d(2), torch.ones(1, 2), torch.ones(1), torch.nn.MSELoss()),
            "buffers running_mean",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_run_that_diverges_says_when():
    with pytest.raises(RuntimeError, match="not finite at .* take a lower learning rate"):
        simulate(AllReduce(Descent(1e3)), quadratic(), Workers(2), epochs=100, batch=BATCH)


def test_an_action_of_the_past_is_our_bug():
    queue = EventQueue(now=2.0)
    with pytest.raises(AssertionError, match=r"planned for 1.0 s, and it is 2.0 s"):
        queue.at(1.0, lambda: None)


def test_a_worker_has_one_batch_at_a_time():
    account = SampleAccount(8, 1, 4, 0)
    first = account.take(0)
    with pytest.raises(AssertionError, match="worker 0 takes a batch while"):
        account.take(0)
    assert account.drop(0) == first and account.take(1) == first and account.samples_left == 8


def test_a_way_is_the_same_text_in_every_process():
    algorithm = PeriodicAveraging(replace(SGD, lr=lr_of_samples), 2)
    log = simulate_times(algorithm, Workers(2), num_samples=4, numel=2, batch=1)
    assert "lr=" in log.algorithm and "lr_of_samples" in log.algorithm and " at 0x" not in log.algorithm


def lr_of_samples(seen: int) -> float:
    return 0.1 / (1 + seen)
