"""Simulate how workers agree, in virtual time, in one process and in float64; replay a run from its log, bit for bit.

run = simulate(ParameterServer(bound=2), digits(), Workers(4, slow={3: 5.0}), epochs=2, batch=16)
run.samples_per_second, run.staleness, run.losses[-1]
replay(run.log, ParameterServer(bound=2), digits()).weights         # the same bits
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from widefield.agreement.all_reduce import AllReduce
from widefield.agreement.compression import packed_bytes
from widefield.agreement.events import EventLog
from widefield.agreement.gossip import Gossip, PairwiseGossip
from widefield.agreement.measures import Measured, SimulatedRun
from widefield.agreement.objectives import Objective
from widefield.agreement.pair_times import PairTimes
from widefield.agreement.peer_weights import PeerWeights
from widefield.agreement.periodic import PeriodicAveraging
from widefield.agreement.round_times import AllReduceTimes, GossipTimes, PeriodicTimes
from widefield.agreement.run_times import RunTimes
from widefield.agreement.sample_account import SampleAccount
from widefield.agreement.server import ParameterServer, even_parts
from widefield.agreement.server_times import AsynchronousTimes, SynchronousTimes
from widefield.agreement.server_weights import ServerWeights
from widefield.agreement.workers import Durations, Workers

Algorithm = AllReduce | PeriodicAveraging | Gossip | PairwiseGossip | ParameterServer

POINTS = 50
"""How often the loss is measured in a run."""


def simulate(
    algorithm: Algorithm,
    objective: Objective,
    workers: Workers,
    *,
    epochs: int = 1,
    batch: int = 16,
    seed: int = 0,
    points: int = POINTS,
) -> SimulatedRun:
    """Train an objective with workers that agree by some algorithm.

    batch: samples per worker and gradient.  seed: of the order of samples, and of all times.  points: how often the loss and
    the consensus distance are measured.
    ValueError: options that do not fit.  AllDiedError: nobody is left.  RuntimeError: the weights are not finite.
    """
    log = simulate_times(
        algorithm, workers, num_samples=objective.num_samples, numel=objective.start.numel(), itemsize=objective.start.itemsize,
        epochs=epochs, batch=batch, seed=seed,
    )  # fmt: skip
    return replay(log, algorithm, objective, points=points)


def simulate_times(
    algorithm: Algorithm,
    workers: Workers,
    *,
    num_samples: int,
    numel: int,
    itemsize: int = 8,
    scale: float = 1.0,
    epochs: int = 1,
    batch: int = 16,
    seed: int = 0,
) -> EventLog:
    """The log alone, without any numbers: of a model of any size, within moments.  As `simulate`.

    numel, itemsize: how many weights there are, and bytes of each as they are sent.
    scale: of all messages, where a small problem stands for a large model.
    """
    account = SampleAccount(num_samples, epochs, batch, seed, may_lose=bool(workers.deaths))
    seconds, events = _times(algorithm, Durations(workers, seed), account, numel, itemsize, scale).run()
    return EventLog(in_words(algorithm), workers.count, num_samples, epochs, numel, seconds, tuple(events))


def _times(algorithm: Algorithm, durations: Durations, account: SampleAccount, numel: int, itemsize: int, scale: float) -> Any:
    """The times of an algorithm."""
    common: dict[str, Any] = {
        "durations": durations,
        "account": account,
        "size": round(numel * itemsize * scale),
        "algorithm": algorithm,
    }
    times: type[RunTimes]
    match algorithm:
        case ParameterServer():
            counts = [part.stop - part.start for part in even_parts(numel, algorithm.servers)]
            sent = 0.0 if algorithm.kind == "hogwild" else scale
            common["sizes"] = tuple(round(count * itemsize * sent) for count in counts)
            common["push_sizes"] = tuple(round(pushed_bytes(algorithm, count, itemsize) * sent) for count in counts)
            algorithm.needed(durations.workers.count)
            times = SynchronousTimes if algorithm.kind == "synchronous" else AsynchronousTimes
        case PairwiseGossip():
            times = PairTimes
        case Gossip():
            times = GossipTimes
        case PeriodicAveraging():
            times = PeriodicTimes
        case AllReduce():
            times = AllReduceTimes
        case _:
            raise ValueError(
                f"{algorithm!r} is no way to agree; take AllReduce, PeriodicAveraging, Gossip, PairwiseGossip or "
                "ParameterServer"
            )
    return times(**common)


def pushed_bytes(algorithm: ParameterServer, numel: int, itemsize: int) -> int:
    """Of a gradient of so many numbers."""
    options = algorithm.compression
    return numel * itemsize if options is None else packed_bytes(numel, itemsize, options)


def replay(
    log: EventLog, algorithm: Algorithm, objective: Objective, *, points: int = POINTS, until_loss: float | None = None
) -> SimulatedRun:
    """Compute a run from its log: the same bits as when it was simulated.

    until_loss: end with the first point at which the loss is that or less; the run's log ends there too.
    ValueError: the log is of another algorithm, or of another objective's size, or does not say enough.
    """
    if not log.exact:
        raise ValueError(
            f"the log is of a run in which {log.workers} workers changed shared weights without locks, and who wrote which "
            "number first stands nowhere, so it cannot be computed again; replay a log of one worker, or of kind=asynchronous"
        )
    if log.algorithm != in_words(algorithm):
        raise ValueError(f"the log is of {log.algorithm}, and the algorithm is {in_words(algorithm)}; replay it with the same")
    if (log.num_samples, log.numel) != (objective.num_samples, objective.start.numel()):
        raise ValueError(
            f"the log is of {log.num_samples:,} samples and {log.numel:,} weights, and the objective has "
            f"{objective.num_samples:,} and {objective.start.numel():,}; replay it with the same"
        )
    kind = ServerWeights if isinstance(algorithm, ParameterServer) else PeerWeights
    weights: Any = kind(algorithm, objective, log.workers)  # type: ignore[arg-type]
    measured = Measured(objective, every=max(1, log.num_samples * log.epochs // max(1, points)))
    for place, event in enumerate(log.events, 1):
        weights.apply(event)
        measured.look(event, weights)
        if until_loss is not None and measured.points and measured.points[-1].loss <= until_loss:
            log = replace(log, seconds=event.time, events=log.events[:place])
            break
    return measured.finish(log, weights)


def in_words(algorithm: Any) -> str:
    """An algorithm as text that is the same in every process: functions by their names."""
    if is_dataclass(algorithm) and not isinstance(algorithm, type):
        inner = ", ".join(f"{one.name}={in_words(getattr(algorithm, one.name))}" for one in fields(algorithm))
        return f"{type(algorithm).__name__}({inner})"
    return f"{algorithm.__module__}.{algorithm.__qualname__}" if callable(algorithm) else repr(algorithm)
