"""Pipeline parallelism: each rank has a stage of the model, and a batch passes through the stages in micro-batches.

With one micro-batch, one stage works at a time; then only memory is saved.  Gradients are averaged over the ranks that have the
same stage.  See pipelining/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.decompositions import BATCH_NORM_OVER
from widefield.capture.fake_parameters import Like
from widefield.capture.interpreter import install_shard, refuse_streams
from widefield.capture.ir import Graph
from widefield.comm.mesh import Mesh
from widefield.fallback import Fallback
from widefield.parallel.strategies import Case, Choices, Phase
from widefield.parallel.strategies._buckets import bucket_mib
from widefield.parallel.strategies.data import _conv_net, synchronize
from widefield.pipelining import stage_state
from widefield.pipelining.partition import Partition, choose_partition
from widefield.pipelining.runtime import PipelineForward, batchwise, refuse_batchwise
from widefield.pipelining.sample_mixing import where_counts_enter, where_samples_meet
from widefield.pipelining.schedule_view import STAGES_PER_RANK, idle_share, schedule_grid
from widefield.plans import Plan
from widefield.private_torch.modules import compiled_call_impl_of
from widefield.tiled.partial_gradient import manage
from widefield.tiled.sample_mixing import name_of

AXIS = "stage"
SECTION = "pipeline"
PHASE = Phase.SPLIT
CHECK_ORDER = 50


def is_used(plan: Plan) -> bool:
    """Where ranks share the layers of a model."""
    return plan.stage > 1


def check_plan(plan: Plan) -> None:
    """ValueError: batch_norm=per_micro_batch without stages, and what `stage_problems` finds."""
    if plan.batch_norm == "per_micro_batch" and plan.stage == 1:
        raise ValueError(
            "batch_norm=per_micro_batch is about the micro-batches of mesh.stage, which is 1; set batch_norm=synchronized, or "
            "averaged for the statistics of each copy"
        )
    for problem in stage_problems(plan):
        raise ValueError(problem)


def apply(
    model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None, sample: Tensor | None = None
) -> Choices:
    """Partition `model` into stages and free the weights of the other stages on this rank.

    sample: a batch as one pass of this rank has it, or a meta tensor of its shape.
    Returns where the model is cut and why, and a Fallback for each layer that needs the whole batch in one micro-batch.
    ValueError: no sample, or stages that cannot be made.  NotImplementedError: a model that cannot be captured, or that needs
    the whole batch while the plan asks for several micro-batches.
    """
    if sample is None:
        raise ValueError(
            f"mesh.stage={mesh.plan.stage} cuts the model for images of a certain shape, and none was given; "
            "call parallelize(model, mesh, sample=images), with as many images as one pass has"
        )
    refuse_streams(model, f"mesh.stage={mesh.plan.stage}")
    plan, most = mesh.plan, max(mesh.gather_objects(len(sample)))  # copies may have unequal batches, and must cut the same
    reasons = synchronize(model, mesh) if mesh.copies > 1 else []
    override = PipelineForward(model, mesh, micro_batches=1)
    override.likes = stage_state.likes_of(model, mesh.device)
    graph, why = _micro_batch(override, model, sample, most)
    _refuse_compiled(plan, model)
    randomness = _stage_randomness(plan) if any(node.draws for node in graph.nodes) else []
    trained = frozenset(name for name, _ in model.named_parameters())
    partition = choose_partition(
        graph, override.stages, balance=plan.pipeline.balance, named=plan.pipeline.stages, trained=trained
    )
    measured: list[str] = []
    if mesh.data_size > 1:
        override.bucket_mib, measured = bucket_mib(model, mesh)
    override.partition = mesh.gather_objects(partition)[0]  # ranks with unequal parts of channels count unequal costs
    stage_state.broadcast_weights(model, mesh)
    stage_state.free_other_stages(model, _mine(override, override.partition), mesh)
    manage(parameter for parameter in model.parameters() if not parameter.is_meta)
    install_shard(model, override)
    reasons += _cuts_in_words(override.partition, override)
    return [*reasons, *why, *_bubble(plan, override.micro_batches), *measured, *randomness]


# ---------------------------------------------------------------------------------------------- plans that cannot be


def stage_problems(plan: Plan) -> list[str]:
    """Why a plan with stages cannot be carried out, a sentence each with the nearest plan that can be; [] where it can."""
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
            f"{stage} runs the model as a captured graph and recompute runs its modules again, which are not called then; set "
            "recompute=null with more pipeline.micro_batches, or mesh.stage=1",
        ),
        (
            plan.compression != "none",
            f"{stage} averages gradients uncompressed, and gradient.compression={plan.compression} is for whole copies; "
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
    """Why the plan's schedule cannot run its number of micro-batches; None where it can."""
    schedule, ranks, micro_batches = plan.pipeline.schedule, plan.stage, plan.pipeline.micro_batches or 1
    rounds = max(1, micro_batches // ranks)
    if schedule in ("gpipe", "1f1b") or micro_batches % rounds == 0:
        return None
    fewer = micro_batches - micro_batches % ranks
    return (
        f"pipeline.schedule={schedule} works in rounds of {ranks} micro-batches, one per stage, and pipeline.micro_batches="
        f"{micro_batches} leaves a part of a round; set {fewer} or {fewer + ranks} micro-batches, or pipeline.schedule=1f1b"
    )


# ---------------------------------------------------------------------------------------------- micro-batches


def _micro_batch(override: PipelineForward, model: nn.Module, sample: Tensor, most: int) -> tuple[Graph, Choices]:
    """The graph of a micro-batch of a batch of `most` images, and why there are so many; sets `override.micro_batches`.

    NotImplementedError: the model mixes or counts the samples of several copies, or of several micro-batches.
    """
    mesh = override.mesh
    plan = mesh.plan
    together = max(2, most) if mesh.copies > 1 else most  # with one sample per copy, two show whether samples mix
    batch = _captured(override, model, sample, together)

    def captured() -> Graph:
        each = -(-most // override.micro_batches)
        return batch if each == together else _captured(override, model, sample, each)

    counted = where_counts_enter(batch, _captured(override, model, sample, 2 * together))
    override.micro_batches, why = _micro_batches(model, batch, plan, counted)
    if mesh.copies > 1 and not plan.independent:
        _refuse_mixing(model, batch, mesh, counted)
    graph = captured()
    if override.micro_batches > 1 and (fewer := where_counts_enter(graph, batch)):
        override.micro_batches, why = _micro_batches(model, batch, plan, fewer)
        graph = captured()
    return graph, why


def _captured(override: PipelineForward, model: nn.Module, sample: Tensor, rows: int) -> Graph:
    """The graph of the model for `rows` images of the sample's shape, dtype and memory format."""
    last = sample.dim() == 4 and sample.is_contiguous(memory_format=torch.channels_last) and not sample.is_contiguous()
    bare = torch.empty((rows, *sample.shape[1:]), dtype=sample.dtype, device="meta")
    bare = bare.to(memory_format=torch.channels_last) if last else bare
    return override.graph_of(model, (Like.of(bare, override.mesh.device),), {})


def _refuse_mixing(model: nn.Module, graph: Graph, mesh: Mesh, counted: list[str]) -> None:
    """NotImplementedError: operations other than BatchNorm, which is synchronized, mix samples or depend on their number.

    counted: operations that depend on the number of samples.
    """
    mixing = [name for name in where_samples_meet(graph) if name != name_of(BATCH_NORM_OVER)]
    if counted and not mixing:
        raise NotImplementedError(
            f"{type(model).__qualname__} computes with the number of samples in a batch ({', '.join(counted[:3])}), of which "
            f"{mesh.copies} copies of it in mesh.stage={mesh.plan.stage} stages have each their part; leave the number out of "
            "the forward, set mesh.independent=true to let each take its own, which is not one device's, or train without "
            "copies, or without stages"
        )
    if mixing:
        raise NotImplementedError(
            f"{type(model).__qualname__} mixes the samples of a batch ({', '.join(mixing[:3])}), and {mesh.copies} copies "
            f"of it in mesh.stage={mesh.plan.stage} stages have each their own; set mesh.independent=true to let each mix its "
            "own, which is not one device's, or train without copies, or without stages"
        )


def _stage_randomness(plan: Plan) -> list[str]:
    if not plan.independent:
        raise NotImplementedError(
            f"the model draws random numbers, as dropout does, and with mesh.stage={plan.stage} every stage draws for itself, "
            "which is not what one device draws; set mesh.independent=true to accept that, or mesh.stage=1, or remove dropout"
        )
    return ["dropout: every stage draws for itself, so masks are not one device's"]


def _mine(override: PipelineForward, partition: Partition) -> frozenset[str]:
    mine = {name for name, stage in partition.owner.items() if override.rank_of(stage) == override.mesh.stage}
    return frozenset(mine | partition.shared)


def _micro_batches(model: nn.Module, graph: Graph, plan: Plan, counted: list[str]) -> tuple[int, Choices]:
    """The number that the plan asks for; else 2 per stage, or 1 where a layer needs the whole batch; and the reasons.

    counted: operations that depend on the number of samples.
    """
    asked, layers = plan.pipeline.micro_batches, batchwise(model, graph) or counted
    exact = plan.batch_norm != "per_micro_batch"
    if asked is not None:
        if asked > 1 and exact:
            refuse_batchwise(model, graph, asked, counted)
        return asked, [f"pipeline.micro_batches={asked}, as asked"]
    if layers and exact:
        why = (
            f"pipeline.micro_batches=1: {len(layers)} layers or operations look at the whole batch ({', '.join(layers[:2])}), "
            "so stages work one after another; batch_norm=per_micro_batch lets them work at the same time, with other numbers"
        )
        return 1, [why, *_on_the_whole_batch(graph, layers)]
    count = 2 * plan.stage
    return count, [f"pipeline.micro_batches={count}: 2 per stage, so that stages work at the same time"]


def _on_the_whole_batch(graph: Graph, layers: Sequence[str]) -> list[Fallback]:
    """A Fallback for each of these layers, with its largest output, and for each operation that `layers` names itself."""
    found: dict[Any, Fallback] = {}
    for node in graph.nodes:
        size = sum(out.bytes for out in node.outs if out is not None)
        key = node.path if node.path in layers else node if name_of(node.op) in layers else None
        if key is not None and (key not in found or found[key].bytes < size):
            found[key] = Fallback("whole batch", node.path, node.name, size)
    return list(found.values())


def _refuse_compiled(plan: Plan, model: nn.Module) -> None:
    if compiled_call_impl_of(model) is not None:
        raise NotImplementedError(
            f"a model in stages runs as the operations that were captured (mesh.stage={plan.stage}), which torch.compile "
            "does not see; set model.compile=false, or mesh.stage=1"
        )


# ---------------------------------------------------------------------------------------------- in words


def _cuts_in_words(partition: Partition, override: PipelineForward) -> list[str]:
    flops, weights = (_shares(costs) for costs in (partition.flops, partition.weight_bytes))
    sent = [f"{size / 2**20:.3g} MiB" for size in partition.crossing_bytes]
    plan = override.mesh.plan
    how = "as pipeline.stages says" if plan.pipeline.stages else f"balanced by {plan.pipeline.balance}"
    return [
        f"stages: cut before {', '.join(partition.begins)}, {how}; stage by stage {flops} of the operations and {weights} of "
        f"the weights' bytes; {', '.join(sent)} of a micro-batch cross the cuts forward, and as much back, skips to later "
        "stages included",
        f"averages: {override.mesh.data_size} ranks have each stage and average its gradients after its last micro-batch",
    ][: 1 + (override.mesh.data_size > 1)]


def _shares(costs: Sequence[float]) -> str:
    total = sum(costs) or 1.0
    return ", ".join(f"{cost / total:.0%}" for cost in costs)


def _bubble(plan: Plan, micro_batches: int) -> list[str]:
    grid = schedule_grid(plan.pipeline.schedule, plan.stage, micro_batches)
    kind = plan.pipeline.schedule
    several = STAGES_PER_RANK[kind]
    per_rank = f" with {several} stages per rank" if several > 1 else ""
    parts = f"{micro_batches} micro-batches" if micro_batches > 1 else "1 micro-batch"
    verb = "leave" if micro_batches > 1 else "leaves"
    return [
        f"schedule {kind}{per_rank}: {parts} on {plan.stage} ranks {verb} {idle_share(grid):.0%} of the "
        "time idle, where stages take equally long"
    ]


# ---------------------------------------------------------------------------------------------- cases


class _Skips(nn.Module):
    """The last layers read early values, the image too; indices of a pooling cross stages without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.Conv2d(10, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.down(x))
        low, places = nn.functional.max_pool2d(high, 2, return_indices=True)
        low = nn.functional.silu(self.norm(self.low(low)))
        return self.up(torch.cat([nn.functional.max_unpool2d(low, places, [2, 2]), high, x], 1))


def _micro(count: int, schedule: str = "1f1b") -> dict[str, Any]:
    return {"pipeline": {"micro_batches": count, "schedule": schedule}}


_GROUPS = partial(_conv_net, partial(nn.GroupNorm, 1))
CASES = [
    Case("batch norm", _conv_net, (7, 2, 6, 5), reason="micro_batches=1: 2 layers or operations look at the whole batch"),
    Case("no batch norm", _GROUPS, (7, 2, 6, 5), reason=r"micro_batches=\d: 2 per stage"),
    Case("a batch that micro-batches do not divide", _GROUPS, (7, 2, 6, 5), _micro(3)),
    Case("skips", _Skips, (5, 2, 6, 4), _micro(4), "skips to later stages included"),
    Case("split backwards", _Skips, (5, 2, 6, 4), _micro(3, "zero_bubble"), "schedule zero_bubble: 3 micro-batches"),
]
