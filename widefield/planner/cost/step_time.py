"""The seconds of a training step on a cluster, from the records of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from widefield.planner.cost.message_time import MessageTimes
from widefield.planner.cost.op_time import OpTimes, Timed
from widefield.planner.cost.simulation import RankClock, Simulation, Span
from widefield.planner.machines.calibration import Calibration
from widefield.planner.machines.cluster import Cluster
from widefield.planner.step_record import StepRecord

READING_OPERATIONS = 30
"""A GPU stands still once a step, for as long as the host takes for so many operations: the host waits for the loss and the
norm of the gradient, judges them, and starts the optimizer.  In profiles of ten models on an H200 this takes 0.5 to 2.1 ms."""

PARTS = ("forward", "backward", "optimizer", "communication", "bubble", "data")


@dataclass
class StepTime:
    """One step.

    seconds: until the last rank is done.  low_seconds, high_seconds: if every figure were off the same way.
    parts: of the slowest rank, by PARTS; they add up to seconds.  forward has the loss; communication: what is not hidden
    behind
        computation; bubble: waiting for ranks that are late; data: waiting for samples.
    spans: the timeline, by rank and start.  busy: the share of the step in which the slowest rank computes.
    efficiency: seconds of one device per sample over those of all ranks; None: no record of one device was given.
    samples_per_second: of all ranks.  sources: share of the seconds by where the figure is from.
    extrapolated: names of operations that were neither measured nor near one that was, those that take longest first.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    parts: dict[str, float]
    spans: list[Span]
    busy: float
    samples_per_second: float
    efficiency: float | None = None
    sources: dict[str, float] = field(default_factory=dict)
    extrapolated: list[str] = field(default_factory=list)


def step_time(
    records: Sequence[StepRecord],
    cluster: Cluster,
    *,
    precision: str | None = None,
    alone: StepRecord | None = None,
    samples_per_second: float | None = None,
    spans: bool = True,
) -> StepTime:
    """The time of the step that `records` describe.

    records: of ranks that differ, at least one; of a pipeline one of each stage.  Ranks without a record are punctual.
    precision: of the recipe; `tf32` lets products of float32 run so.  alone: the step of one device, for the efficiency.
    samples_per_second: at which the loaders of all ranks together give samples; None: they keep up.
    spans: whether to keep the timeline.
    ValueError: no record, or a record for more ranks than the cluster has.
    """
    _check(records, cluster)
    times, messages = OpTimes(cluster, precision), MessageTimes(cluster)
    measured = cluster.calibration or Calibration({}, cluster.device, cluster.inside)
    simulation = Simulation(
        records,
        lambda event: times.of(event).seconds,
        lambda event, rank: messages.of(event, rank).seconds,
        launch_seconds=launch_seconds(cluster),
        message_host_seconds=measured.message_host_seconds,
        unevenness=measured.unevenness,
        waking_seconds=measured.waking_seconds,
        message_cpu_share=measured.message_cpu_share,
        on_cpu=cluster.device.is_cpu,
        spans=spans,
    )
    simulation.run()
    _wait_for_the_host(simulation, cluster)
    step, last = _step_of(simulation, records[0].samples, samples_per_second)
    _add_uncertainty(step, last.record, times, messages)
    if alone is not None:
        one = step_time([alone], cluster, precision=precision, spans=False)
        step.efficiency = step.samples_per_second / one.samples_per_second / max(1, records[0].ranks)
    return step


def _wait_for_the_host(simulation: Simulation, cluster: Cluster) -> None:
    """At the end of a step on GPUs."""
    seconds = 0.0 if cluster.device.is_cpu else READING_OPERATIONS * launch_seconds(cluster)
    for clock in simulation.clocks.values():
        clock.device = clock.now + seconds
        clock.busy["optimizer"] += seconds


def _step_of(simulation: Simulation, samples: int, samples_per_second: float | None) -> tuple[StepTime, RankClock]:
    """The step's time without its uncertainty, and the clock of the rank that is last."""
    last = max(simulation.clocks.values(), key=lambda clock: clock.now)
    parts = _parts(last)
    if samples_per_second is not None:
        parts["data"] = max(0.0, samples / samples_per_second - last.now)
    seconds = sum(parts.values())
    spans = [span for clock in simulation.clocks.values() for span in clock.spans]
    busy = sum(last.busy.values()) / seconds if seconds else 0.0
    return StepTime(seconds, seconds, seconds, parts, spans, busy, samples / seconds if seconds else 0.0), last


def launch_seconds(cluster: Cluster) -> float:
    """Of the host, for each operation."""
    measured = cluster.calibration.host_seconds if cluster.calibration is not None else 0.0
    return measured or cluster.device.launch_seconds


def _check(records: Sequence[StepRecord], cluster: Cluster) -> None:
    if not records:
        raise ValueError("no record of a step was given; record one with emulated_step")
    if (ranks := records[0].ranks) > cluster.ranks:
        raise ValueError(
            f"the step was recorded for {ranks} ranks and the cluster {cluster.text} has {cluster.ranks} devices; name "
            "a larger cluster, or record the step for fewer ranks"
        )
    if len({record.ranks for record in records}) > 1 or len({record.rank for record in records}) < len(records):
        raise ValueError("the records are not of different ranks of one step; record each rank once, for one number of ranks")


def _parts(clock: RankClock) -> dict[str, float]:
    busy = Counter(clock.busy)
    forward = busy["forward"] + busy["loss"]
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"forward": forward, "backward": busy["backward"], "optimizer": busy["optimizer"] + busy["other"]}
    parts["bubble"] = clock.bubble
    parts["communication"] = max(0.0, clock.now - forward - busy["backward"] - parts["optimizer"] - clock.bubble)
    return parts


def _add_uncertainty(step: StepTime, record: StepRecord, times: OpTimes, messages: MessageTimes) -> None:
    """Share of sources and interval, of the rank that is last; messages count by what of them is exposed."""
    computed = [(event.name, times.of(event)) for event in record.operations]
    sent = [messages.of(event, record.rank) for event in record.messages]
    all_sent = sum(one.seconds for one in sent)
    exposed = min(1.0, step.parts["communication"] / all_sent) if all_sent else 0.0
    by_source: Counter[str] = Counter()
    for one in (timed for _, timed in computed if timed.seconds):
        by_source[one.source] += one.seconds  # type: ignore[assignment]
    for one in sent:
        by_source[one.source] += one.seconds * exposed  # type: ignore[assignment]
    error = sum(one.error_seconds for _, one in computed) + exposed * sum(one.error_seconds for one in sent)
    total = sum(by_source.values())
    step.sources = {source: seconds / total for source, seconds in by_source.items()} if total else {}
    step.low_seconds, step.high_seconds = max(0.0, step.seconds - error), step.seconds + error
    step.extrapolated = _slowest(computed)


def _slowest(computed: Iterable[tuple[str, Timed]]) -> list[str]:
    total: Counter[str] = Counter()
    for name, timed in computed:
        if timed.source == "roofline":
            total[name] += timed.seconds  # type: ignore[assignment]
    return [name for name, _ in total.most_common()]
