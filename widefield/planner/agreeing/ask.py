"""From a recipe, its machines and its stragglers to a table of ways to agree.  A worker's step is priced by the planner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from widefield.agreement import Connection, Delay, Workers
from widefield.config import RunConfig
from widefield.config.agreement import AgreementConfig
from widefield.planner.agreeing.estimate import STEPS, AgreementEstimate, AgreementSimulation, SmallProblem
from widefield.planner.agreeing.texts import link_text_read, stragglers_of
from widefield.planner.agreeing.ways import notes_of, ways_named
from widefield.planner.machines import Cluster, cluster_of
from widefield.planner.search.ask import PlanRequest, StandInTask, config_of_request, subject_of
from widefield.planner.search.estimate import PlanEstimate
from widefield.planner.search.layouts import RunLayout
from widefield.planner.search.pricing import Pricing
from widefield.quantity import bytes_text, count_of
from widefield.training.given import NOTHING, Given

MOST_WORKERS = 512
"""With more, a step of all would have more than a third of the small problem's samples."""
LOSS = 0.6
"""Of the small problem, by which time to accuracy is told: some 92 in 100 digits are read right there."""
LARGEST_JITTER = 3.0


@dataclass(frozen=True)
class AgreementRequest:
    """As PlanRequest, where names are the same.

    agreement: `all`, or the name of a way.  workers: None: the cluster's ranks.  cluster: None: so many machines like this one,
    each a core, over 10 Gbit Ethernet.  stragglers: as texts.stragglers_of reads them.
    step_seconds, model_bytes: of a worker's step, and of the weights as they are sent; None: as the planner predicts.
    link: as texts.link_text_read reads it, in place of the cluster's.
    loss: of the small problem.  jitter: the standard deviation of the logarithm of a step's seconds.
    """

    recipe: str | Path | RunConfig
    agreement: str = "all"
    workers: int | None = None
    cluster: str | None = None
    overrides: Sequence[str] = ()
    stragglers: Sequence[str | float] = ()
    step_seconds: float | None = None
    model_bytes: int | None = None
    link: str | None = None
    network: str | None = None
    loss: float = LOSS
    jitter: float = 0.0
    seed: int = 0
    image: tuple[int, ...] | None = None
    classes: int | None = None
    batch: int | None = None
    task: StandInTask | None = None
    trust: bool = False
    given: Given = NOTHING


@dataclass(frozen=True)
class AgreementAnswer:
    """estimates: in the order of ways.WAYS.  samples: of the recipe, in a worker's step.  notes: sentences about the figures.

    problem_samples, problem_batch: of the small problem, in all and in a worker's step there.
    """

    model: str
    workers: int
    stragglers: dict[int, float]
    step_seconds: float
    samples: int
    model_bytes: int
    latency_seconds: float
    bytes_per_second: float
    loss: float
    problem_samples: int
    problem_batch: int
    steps: int
    seed: int
    estimates: list[AgreementEstimate]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_tree(self) -> dict[str, Any]:
        """As JSON can hold it."""
        own = {name: value for name, value in vars(self).items() if name not in ("estimates", "stragglers")}
        stragglers = {str(worker): factor for worker, factor in self.stragglers.items()}
        return own | {"stragglers": stragglers, "ways": [dict(vars(one)) for one in self.estimates]}


def ask_agreement(request: AgreementRequest, say: Callable[[str], None] = lambda text: None) -> AgreementAnswer:
    """Reply a request.  say: hears of each way before it is simulated.

    ValueError: no such way, recipe, model, machines, straggler or link; numbers out of range.  NotImplementedError: the
    model cannot be emulated, which says what to do instead.
    """
    began, ways = time.monotonic(), ways_named(request.agreement)
    _check(request)
    plan = _as_plan(request)
    config, cluster = config_of_request(plan), cluster_of(plan.cluster, network=plan.network)
    workers = _workers_of(request, cluster)
    stragglers, (latency, rate) = stragglers_of(request.stragglers, workers), _link_of(request, cluster)
    step = _workers_step(request, plan, config.data.batch, workers)
    compute = Delay(step.seconds, "lognormal", request.jitter) if request.jitter else Delay(step.seconds)
    group = Workers(workers, compute, stragglers, Connection(Delay(latency), rate))
    problem = SmallProblem.of(workers)
    simulation = AgreementSimulation(problem, group, step.samples, step.model_bytes, request.loss, request.seed)
    found = []
    for way in ways:
        say(f"{way.name} ...")
        found.append(simulation.estimate(way, config.agreement))
    return AgreementAnswer(
        config.model.name, workers, stragglers, step.seconds, step.samples, step.model_bytes, latency, rate,
        request.loss, problem.objective.num_samples, problem.batch, STEPS, request.seed, found, [*step.notes, *notes_of(ways)],
        time.monotonic() - began,
    )  # fmt: skip


def _check(request: AgreementRequest) -> None:
    """ValueError: numbers out of range, before anything is opened."""
    workers = request.workers
    if workers is None and request.cluster is None:
        raise ValueError("--agreement needs to know how many; give --workers 256, or machines, as --cluster 32x8xH100")
    if workers is not None and not 2 <= workers <= MOST_WORKERS:
        raise ValueError(
            f"--workers is {workers}; 2 to {MOST_WORKERS} can be simulated, since one has nobody to agree with and more would "
            "leave too few steps in an epoch of the small problem"
        )
    for name, value in (("--step-seconds", request.step_seconds), ("--model-size", request.model_bytes)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value:g}; write a number above 0")
    if not 0 < request.loss < math.log(10):
        raise ValueError(
            f"--loss is {request.loss:g}; the small problem begins at {math.log(10):.3f}, so write a loss between 0 and that"
        )
    if not 0 <= request.jitter <= LARGEST_JITTER:
        raise ValueError(f"--jitter is {request.jitter:g}; write the spread of a step's time from 0 to 3, as 0.1")
    if request.link is not None and request.network is not None:
        raise ValueError(f"--link {request.link} and --network {request.network} both say how workers are connected; leave one")


def _as_plan(request: AgreementRequest) -> PlanRequest:
    return PlanRequest(
        request.recipe, request.cluster or f"{request.workers}x1xcpu", request.overrides, request.image, request.classes,
        request.batch, request.task, request.network, trust=request.trust, given=request.given,
    )  # fmt: skip


def _workers_of(request: AgreementRequest, cluster: Cluster) -> int:
    """ValueError: there are fewer than two, too many, or the cluster has another number of them."""
    workers = request.workers or cluster.ranks
    if workers != cluster.ranks:
        raise ValueError(
            f"--workers {workers} on --cluster {cluster.text}, which has {count_of(cluster.ranks, 'device')}, one for each "
            "worker; leave --workers out, or name machines with so many"
        )
    if not 2 <= workers <= MOST_WORKERS:
        raise ValueError(
            f"--cluster {cluster.text} has {count_of(workers, 'device')}, one for each worker; 2 to {MOST_WORKERS} workers can "
            "be simulated"
        )
    return workers


def _link_of(request: AgreementRequest, cluster: Cluster) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of one worker: as asked, else the slowest that messages to all cross."""
    if request.link is not None:
        return link_text_read(request.link)
    link = cluster.link_of(range(cluster.ranks))
    rate = link.bytes_per_second if link is cluster.inside else cluster.network_bytes_per_second()
    return link.latency_seconds, rate


@dataclass(frozen=True)
class _WorkersStep:
    """What a worker's step takes.  notes: where the figures are from."""

    seconds: float
    samples: int
    model_bytes: int
    notes: list[str]


def _workers_step(request: AgreementRequest, plan: PlanRequest, batch: int, workers: int) -> _WorkersStep:
    """The step of one worker with its part of the recipe's batch, without messages."""
    samples = max(1, batch // workers)
    notes = [] if samples * workers == batch else [
        f"a batch of {batch} over {workers} workers: {count_of(samples, 'sample')} for each are taken, "
        f"{samples * workers:,} in a step of all; --batch sets it"
    ]  # fmt: skip
    seconds, size = request.step_seconds, request.model_bytes
    if seconds is None or size is None:
        predicted, weights, further = _predicted(plan, samples)
        seconds, size, notes = seconds or predicted, size or weights, notes + further * (seconds is None)
    return _WorkersStep(seconds, samples, size, notes)


def _predicted(plan: PlanRequest, samples: int) -> tuple[float, int, list[str]]:
    """(seconds, bytes of the weights, notes) of a step on one device.

    ValueError: the step is refused.  NotImplementedError: the model cannot be emulated.
    """
    try:
        pricing = subject_of(plan).pricing
        alone = _single_worker(pricing, samples)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}. With --step-seconds and --model-size no step is emulated") from error
    if alone.state == "refused":
        raise ValueError(
            f"a worker's step of {count_of(samples, 'sample')} cannot be priced: {alone.reason}. Give --step-seconds and "
            "--model-size in its place, or another --batch"
        )
    device = pricing.cluster.device.name
    spread = f"{alone.low_seconds:.3g} to {alone.high_seconds:.3g} s"
    notes = [f"a worker's step is the planner's prediction for one {device}, {spread}"]
    if alone.state == "too large":
        notes.append(
            f"it takes {bytes_text(alone.peak_memory_bytes)} of the {bytes_text(alone.memory_bytes)} that a {device} has, so "
            "it does not fit as it is"
        )
    return alone.seconds, alone.fullest.parts.get("weights", 0), notes


def _single_worker(pricing: Pricing, samples: int) -> PlanEstimate:
    """Of one worker by itself: what workers do between steps is simulated.  CannotEmulate: as it says."""
    config = pricing.config.model_copy(update={"agreement": AgreementConfig()})
    return Pricing(config, pricing.cluster, pricing.given).with_batch(samples).estimate(RunLayout())
