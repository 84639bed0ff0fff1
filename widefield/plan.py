"""How is a run laid out over ranks?  A Plan: mesh axes with their sizes and the choices of each strategy, as data.

Frozen, with a text form that reads back equal; checked here and nowhere else; printed, and stored with every checkpoint.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator

from widefield.config import PipelineConfig, Positive, RecomputeConfig, RunConfig, ShardingConfig, StreamConfig
from widefield.naming import names_in
from widefield.section import Section, parse_section, to_yaml

STRATEGY_OF_AXIS = {
    "replicate": "data",
    "shard": "fully_shard",
    "space": "space",
    "channel": "channel",
    "stage": "pipeline",
}
"""Which file in parallel/strategies/ lays a model out over an axis larger than 1."""


class Plan(Section):
    """Mesh axes and sizes, and how gradients and statistics are agreed on."""

    replicate: Positive = 1
    """Whole copies of the model, each with its share of the batch."""
    shard: Positive = 1
    space: list[Positive] = []
    """Tiles that every image is cut into, a number per dim; none where images stay whole: `[1, 1]` becomes `[]`."""
    channel: Positive = 1
    stage: Positive = 1
    data_strategy: Literal["data", "data_parallel"] = "data"
    independent: bool = False
    sharding: ShardingConfig = ShardingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recompute: RecomputeConfig | None = None
    batch_norm: Literal["synchronized", "averaged", "broadcast", "per_micro_batch"] = "synchronized"
    batch_norm_group: Positive = 1
    """Neighbouring copies that share their statistics under batch_norm=averaged."""
    accumulate: Positive = 1
    bucket_mib: float | None = 25.0
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    agreement: Literal["mean", "adasum"] = "mean"
    powersgd_rank: Positive = 1
    powersgd_start_step: int = 1000
    stream: StreamConfig | None = None
    """Tiles in time: every rank runs what it holds of an image tile after tile; None runs it at once."""

    @field_validator("space", mode="after")
    @classmethod
    def _one_tile_is_none(cls, space: list[int]) -> list[int]:
        """A grid of one tile is no grid, for all who ask."""
        return space if math.prod(space) > 1 else []

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis, outermost first."""
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "space": math.prod(self.space),
            "channel": self.channel,
            "stage": self.stage,
        }

    @property
    def is_one_batch(self) -> bool:
        """Whether copies' samples are one batch where they meet; else a copy draws, writes to buffers and mixes by itself."""
        return self.batch_norm == "synchronized" and not self.independent

    @property
    def ranks(self) -> int:
        """How many ranks the plan needs."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        """`replicate=2 x space=[2, 1]` and what differs from one device; `one rank, streamed in 4 x 4 tiles`; `one rank`."""
        used = [f"{axis}={self.space if axis == 'space' else size}" for axis, size in self.axes.items() if size > 1]
        further = [f"ZeRO-{self.sharding.zero}"] * (self.shard > 1) + ["recompute"] * (self.recompute is not None)
        further += [f"streamed in {self.stream}"] if self.stream else []
        return ", ".join([" x ".join(used) or "one rank", *further])


def plan_of(config: RunConfig, ranks: int) -> Plan:
    """The plan that a config asks for on `ranks` ranks; an axis left null takes the ranks that the others leave."""
    mesh, gradient = config.mesh, config.gradient
    others = mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
    return Plan(
        replicate=mesh.replicate or max(1, ranks // others),
        shard=mesh.shard,
        space=mesh.space,
        channel=mesh.channel,
        stage=mesh.stage,
        data_strategy=mesh.data_strategy,
        independent=mesh.independent,
        sharding=config.sharding,
        pipeline=config.pipeline,
        recompute=config.recompute,
        batch_norm=config.batch_norm,
        batch_norm_group=config.batch_norm_group,
        accumulate=gradient.accumulate,
        bucket_mib=gradient.bucket_mib,
        compression=gradient.compression,
        agreement=gradient.agreement,
        powersgd_rank=gradient.powersgd_rank,
        powersgd_start_step=gradient.powersgd_start_step,
        stream=config.stream,
    )


def ranks_asked_for(config: RunConfig) -> int | None:
    """How many ranks the mesh of a config names; None where `replicate` is left to the machine."""
    mesh = config.mesh
    if mesh.replicate is None:
        return None
    return mesh.replicate * mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage


def check(plan: Plan, *, ranks: int, samples_per_step: int | None = None) -> None:
    """Refuse, in words, a plan that `ranks` ranks cannot carry out exactly.  Every rank calls this before any message.

    ValueError: sizes the user can change.  NotImplementedError: what no file in parallel/strategies/ does yet.
    """
    _check_strategies(plan)
    _check_ranks(plan, ranks)
    _check_data_parallel(plan)
    _check_mixes(plan)
    for problem in stage_problems(plan):
        raise ValueError(problem)
    _check_adasum(plan)
    _check_batch_norm_group(plan)
    copies = plan.replicate * plan.shard
    if samples_per_step is not None and samples_per_step < copies:
        raise ValueError(
            f"{copies} copies of the model share a batch of {samples_per_step} samples, so some would always be idle; "
            f"use data.batch_size={copies} or more, or fewer ranks on mesh.replicate"
        )


def _check_mixes(plan: Plan) -> None:
    """NotImplementedError: two ways of running a model that no program joins; ValueError: a choice about what is not there."""
    channel, stream = f"mesh.channel={plan.channel}", f"stream (here {plan.stream})"
    if plan.channel > 1 and plan.stream is not None:
        raise NotImplementedError(
            f"{channel} runs a model's operations on parts of channels and {stream} on tiles in time, and no program does "
            f"both; set stream=null and mesh.space=[{plan.channel}, 1] beside mesh.channel, or mesh.channel=1"
        )
    if plan.recompute is not None and (plan.channel > 1 or plan.stream is not None):
        other, cure = (channel, "mesh.channel=1") if plan.channel > 1 else (stream, "stream=null")
        raise NotImplementedError(
            f"recompute makes modules again as they are called, and with {other} a model runs as operations, its modules never "
            f"called; set recompute=null, or {cure}"
        )
    if plan.batch_norm == "per_micro_batch" and plan.stage == 1:
        raise ValueError(
            "batch_norm=per_micro_batch is about the micro-batches of mesh.stage, which is 1; set batch_norm=synchronized, or "
            "averaged for the statistics of each copy"
        )
    if plan.sharding.offload and (plan.shard == 1 or plan.sharding.zero == 1):
        why = "mesh.shard=1" if plan.shard == 1 else "sharding.zero=1"
        raise ValueError(
            f"sharding.offload=true keeps parts of weights in the CPU's memory and {why} leaves weights whole; set mesh.shard "
            "with sharding.zero=3, or sharding.offload=false"
        )


def stage_problems(plan: Plan) -> list[str]:
    """Why a plan with stages cannot be carried out, a sentence each with the nearest plan that can; none where it can."""
    if plan.stage == 1:
        return []
    stage = f"mesh.stage={plan.stage}"
    problems = [
        (
            plan.shard > 1 and plan.sharding.zero > 1,
            f"{stage} and sharding.zero={plan.sharding.zero} would both deal out a layer's weights among "
            f"mesh.shard={plan.shard}; set sharding.zero=1, which shares optimizer state alone, or mesh.stage=1 and "
            f"mesh.shard={plan.shard * plan.stage}",
        ),
        (
            plan.stream is not None,
            f"{stage} runs a stage at once and stream runs tile after tile; set stream=null, or mesh.stage=1",
        ),
        (
            plan.recompute is not None,
            f"{stage} keeps what a micro-batch leaves for its backward and recompute would follow the model's own modules; set "
            "recompute=null with more pipeline.micro_batches, or mesh.stage=1",
        ),
        (
            plan.compression != "none",
            f"{stage} averages gradients itself, as they are, and gradient.compression={plan.compression} is for whole copies; "
            "set gradient.compression=none",
        ),
        (
            plan.batch_norm in ("averaged", "broadcast"),
            f"{stage} leaves each rank the running statistics of its own stage, and batch_norm={plan.batch_norm} compares "
            "those of all ranks; set batch_norm=synchronized, or per_micro_batch",
        ),
        (
            plan.data_strategy == "data_parallel",
            f"data_strategy=data_parallel drives all GPUs from one process and {stage} wants one per stage; "
            "set mesh.data_strategy=data",
        ),
    ]
    schedule = _schedule_problem(plan)
    return [*(problem for holds, problem in problems if holds), *([schedule] if schedule is not None else [])]


def _schedule_problem(plan: Plan) -> str | None:
    """Why a schedule cannot run so many micro-batches; None where it can."""
    schedule, ranks, micro_batches = plan.pipeline.schedule, plan.stage, plan.pipeline.micro_batches or 1
    rounds = max(1, micro_batches // ranks)
    if schedule in ("gpipe", "1f1b") or micro_batches % rounds == 0:
        return None
    fewer = micro_batches - micro_batches % ranks
    return (
        f"pipeline.schedule={schedule} works in rounds of {ranks} micro-batches, one per stage, and pipeline.micro_batches="
        f"{micro_batches} leaves a part of a round; set {fewer} or {fewer + ranks} micro-batches, or pipeline.schedule=1f1b"
    )


def _check_strategies(plan: Plan) -> None:
    have = names_in("widefield.parallel.strategies")
    for axis, size in plan.axes.items():
        if size > 1 and STRATEGY_OF_AXIS[axis] not in have:
            raise NotImplementedError(
                f"mesh.{axis}={plan.space if axis == 'space' else size} cannot run: parallel/strategies/ has no "
                f"{STRATEGY_OF_AXIS[axis]}.py. It has: {', '.join(have)}. Set mesh.{axis}={'[]' if axis == 'space' else 1}."
            )


def _check_ranks(plan: Plan, ranks: int) -> None:
    if plan.ranks == ranks:
        return
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items() if size > 1) or "every axis 1"
    others = plan.ranks // plan.replicate
    advice = f"set mesh.replicate={ranks // others}" if ranks % others == 0 else f"start a multiple of {others} ranks"
    raise ValueError(f"the mesh ({axes}) needs {plan.ranks} ranks and there are {ranks}; {advice}, or start {plan.ranks} ranks")


def _check_data_parallel(plan: Plan) -> None:
    if plan.data_strategy != "data_parallel":
        return
    if plan.space:
        raise ValueError(
            f"data_strategy=data_parallel deals out whole images to the GPUs of one process and mesh.space={plan.space} cuts "
            "them; set mesh.space=[], or mesh.data_strategy=data for one process per GPU"
        )
    if plan.stream is not None:
        raise ValueError(
            f"data_strategy=data_parallel runs copies of the model in threads and a stream (here {plan.stream}) runs one at a "
            "time; set stream=null, or mesh.data_strategy=data for one process per GPU"
        )
    if plan.ranks > 1:
        raise ValueError(
            f"data_strategy=data_parallel drives all GPUs from one process and the mesh asks for {plan.ranks}; "
            "set mesh.replicate=1, or mesh.data_strategy=data for one process per GPU"
        )
    if plan.batch_norm != "broadcast":
        raise ValueError(
            f"torch.nn.DataParallel normalizes each GPU's share alone, so batch_norm={plan.batch_norm} cannot hold; "
            "set batch_norm=broadcast to accept that, or mesh.data_strategy=data"
        )


def _check_adasum(plan: Plan) -> None:
    if plan.agreement != "adasum":
        return
    others = [axis for axis, size in plan.axes.items() if size > 1 and axis != "replicate"]
    if others:
        raise NotImplementedError(
            f"gradient.agreement=adasum combines the gradients of whole copies and this mesh has {', '.join(others)} too, over "
            "which gradients are summed; set gradient.agreement=mean, or use mesh.replicate alone"
        )
    if plan.replicate & (plan.replicate - 1):
        raise ValueError(
            f"gradient.agreement=adasum combines ranks in pairs, then pairs of pairs, and mesh.replicate={plan.replicate} is "
            "no power of two; start 2, 4, 8, ... ranks, or set gradient.agreement=mean"
        )
    if plan.compression != "none":
        raise ValueError(
            f"gradient.agreement=adasum and gradient.compression={plan.compression} both say what travels in place of the "
            "mean; set one of them back (agreement=mean, compression=none)"
        )


def _check_batch_norm_group(plan: Plan) -> None:
    size, copies = plan.batch_norm_group, plan.replicate
    if size == 1:
        return
    if plan.batch_norm != "averaged":
        raise ValueError(
            f"batch_norm_group={size} shares statistics among some copies and batch_norm={plan.batch_norm} does not: each "
            "group has running statistics of its own, which only batch_norm=averaged makes one; set that, or batch_norm_group=1"
        )
    if copies % size:
        raise ValueError(
            f"batch_norm_group={size} cannot deal out {copies} copies of the model evenly; take a divisor of {copies}"
        )
    others = [axis for axis, ranks in plan.axes.items() if ranks > 1 and axis != "replicate"]
    if others:
        raise NotImplementedError(
            f"batch_norm_group={size} shares statistics among copies that lie on one rank each and this mesh has "
            f"{', '.join(others)} too; set batch_norm_group=1, or use mesh.replicate alone"
        )


def to_text(plan: Plan) -> str:
    """The plan as YAML; `from_text` gives it back equal."""
    return to_yaml(plan)


def from_text(text: str, *, name: str = "plan") -> Plan:
    """The plan in a YAML text; ValueError names the key that is wrong."""
    return parse_section(Plan, text, name=name)
