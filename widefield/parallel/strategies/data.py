"""Data parallelism: a full copy of the model per rank, gradients averaged in buckets during each backward.

See `_reducer.py` for what a backward may be.  Two trial passes, where a trial step is given, show which parameters get
gradients and in which order.  So the buckets are the same in the first step and in a resumed run: from 3 ranks on, the order of
a sum decides its last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from widefield.comm.mesh import Mesh
from widefield.comm.process_groups import group_among
from widefield.parallel.strategies import Case, Phase
from widefield.parallel.strategies._adasum import adasum_hook
from widefield.parallel.strategies._buckets import GradientOrder, bucket_mib
from widefield.parallel.strategies._forward_route import Watched, watch
from widefield.parallel.strategies._forward_state import without_trace
from widefield.parallel.strategies._part_calls import refuse_separate_calls, roots_of
from widefield.parallel.strategies._reducer import Hook, Reducer
from widefield.parallel.strategies._shared_forward import SharedForward
from widefield.plans import Plan
from widefield.tiled.sync_batch_norm import SyncBatchNorm, broadcast_buffers

AXIS = "replicate"
PHASE = Phase.AVERAGE
CHECK_ORDER = 60

_REDUCERS: WeakKeyDictionary[nn.Module, Reducer] = WeakKeyDictionary()


def is_used(plan: Plan) -> bool:
    """Where several ranks have the same weights: copies of the model, or ranks that share the tiles of an image."""
    return plan.data_strategy == "data" and plan.shard == plan.stage == 1 and plan.replicate * plan.axes["space"] > 1


def check_plan(plan: Plan) -> None:
    """ValueError, NotImplementedError: agreement=adasum, or batch_norm_group, with axes or choices they exclude."""
    _check_adasum(plan)
    _check_batch_norm_group(plan)


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Make every backward average the gradients of `model` over `mesh.data_group`; returns the reasons for each choice.

    Weights and buffers become rank 0's.  A model that this strategy was applied to before gets new buckets.
    """
    plan = mesh.plan
    reasons = []
    if plan.batch_norm == "synchronized" and mesh.copies > 1:  # tiles of one image share statistics by the rules of ops/
        reasons += synchronize(model, mesh)
    if plan.batch_norm_group > 1:
        reasons += _share_statistics(model, mesh)
    broadcast_weights(model, mesh)
    before = _REDUCERS.pop(model, None)
    if before is not None:
        before.close()
    if not any(True for _ in model.parameters()):
        watched = watch(model)
        share_batch(model, watched, mesh, mesh.lend_group(watched))
        return [*reasons, "the model has no parameters, so there is nothing to average"]
    gradient_order = None if trial_step is None else _gradient_order(model, mesh, trial_step)
    size, measured = bucket_mib(model, mesh)
    hook, state, compressed = _compression(mesh)
    reducer = Reducer(model, bucket_bytes=int(size * 2**20), gradient_order=gradient_order, hook=hook, state=state)
    reducer.group = mesh.lend_group(reducer)
    _REDUCERS[model] = reducer
    for root in roots_of(model):
        watched = watch(root)
        watched.before += [partial(send_buffers, mesh)] if plan.batch_norm == "broadcast" else []
        watched.after.append(reducer.after_forward)
        share_batch(root, watched, mesh, reducer.group)
    return [*reasons, _in_words(reducer, gradient_order, size), *measured, *compressed]


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients and sends nothing.  Does nothing for a model without this strategy."""
    reducer = _REDUCERS.get(model)
    return nullcontext() if reducer is None else reducer.paused()


def share_batch(model: nn.Module, watched: Watched, mesh: Mesh, group: dist.ProcessGroup, **options: Any) -> None:
    """Treat the samples of all copies as one batch, unless the plan has `independent`.  options: of SharedForward."""
    if mesh.copies > 1 and mesh.plan.is_one_batch:
        watched.around = SharedForward(mesh, group, **options).call
        refuse_separate_calls(model)


def send_buffers(mesh: Mesh, model: nn.Module, *_: Any) -> None:
    """Before a training pass: overwrite buffers with those of rank 0, as DDP does."""
    if model.training and torch.is_grad_enabled():
        broadcast_buffers(model, mesh)


def broadcast_weights(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite weights and buffers on all ranks by those of rank 0."""
    mesh.broadcast_all_([parameter.detach() for parameter in model.parameters() if not parameter.is_meta])
    broadcast_buffers(model, mesh)


def synchronize(model: nn.Module, mesh: Mesh) -> list[str]:
    """Convert every BatchNorm to SyncBatchNorm; returns the reason.  NotImplementedError: one that cannot be converted."""
    SyncBatchNorm.convert(model, mesh.statistics_group, alike=mesh.grid.size)
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    count = sum(layer.training or not model.training for layer in layers)  # a frozen one has no statistics of the batch
    return [
        f"BatchNorm: {count} layers share their statistics over {mesh.data_size} ranks, so that the numbers are one device's"
    ] * (count > 0)


def _share_statistics(model: nn.Module, mesh: Mesh) -> list[str]:
    """Give the BatchNorms of neighbouring copies common statistics.  Every rank creates all groups, as torch requires."""
    each = mesh.plan.batch_norm_group
    group = group_among([list(range(first, first + each)) for first in range(0, mesh.size, each)])
    SyncBatchNorm.convert(model, group)
    return [
        f"BatchNorm: statistics are those of {each} neighbouring copies of {mesh.copies}; running statistics are averaged once "
        "per epoch"
    ]


# ---------------------------------------------------------------------------------------------- plans that cannot be


def _check_adasum(plan: Plan) -> None:
    if plan.agreement.name != "adasum":
        return
    others = [axis for axis, size in plan.axes.items() if size > 1 and axis != "replicate"]
    if others:
        raise NotImplementedError(
            f"agreement=adasum combines the gradients of whole copies and this mesh has {', '.join(others)} too, over "
            "which gradients are summed; set agreement=mean, or use mesh.replicate alone"
        )
    if plan.replicate & (plan.replicate - 1):
        raise ValueError(
            f"agreement=adasum combines ranks in pairs, then pairs of pairs, and mesh.replicate={plan.replicate} is "
            "no power of two; start 2, 4, 8, ... ranks, or set agreement=mean"
        )
    if plan.compression != "none":
        raise ValueError(
            f"agreement=adasum and gradient.compression={plan.compression} both say what travels in place of the "
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


# ---------------------------------------------------------------------------------------------- trial passes


def _gradient_order(model: nn.Module, mesh: Mesh, trial_step: Callable[[], Tensor]) -> GradientOrder:
    """The order of gradients in the trial passes of all ranks, merged."""
    names = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    number = {name: n for n, name in enumerate(names)}
    trained = tuple(number[name] for name, p in model.named_parameters() if p.requires_grad and name in number)
    found = [used for of_rank in trial_passes(model, mesh, trial_step) for used in of_rank]
    passes = [tuple(number[name] for name in used if name in number) for used in found]
    return GradientOrder.merge(
        [GradientOrder(tuple(dict.fromkeys(used)), trained, len(set(used)) == len(used)) for used in passes]
    )


def _in_words(reducer: Reducer, gradient_order: GradientOrder | None, mib: float) -> str:
    """The reason of `apply`: how many messages of gradients there are, and which parameters got none in trial passes."""
    if gradient_order is None:
        return (
            f"gradients travel in messages of up to {mib:g} MiB: the first backward shows which parameters get some and sends "
            "at its end, later ones while they run"
        )
    layout = reducer.layout()
    assert layout is not None, "trial passes have shown it"
    count = len(layout.buckets)
    travel = f"gradients travel in {count} message{'s' * (count != 1)} of up to {mib:g} MiB"
    trained = len(layout.where) + len(layout.late)
    if not layout.late:
        return f"{travel} while a backward runs: all {trained} parameters get one in trial passes"
    names = [reducer.names[number] for number in layout.late]
    return (
        f"{travel}: {len(names)} of {trained} parameters got none in trial passes ({_some(names)}) and travel only when they "
        "get one"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def trial_passes(model: nn.Module, mesh: Mesh, trial_step: Callable[[], Tensor]) -> list[list[list[str]]]:
    """Run a trial step with its backward and restore all state; once more, where on a rank it may then take other branches.

    Returns for each rank and each of its passes the parameters that got gradients, in order, named once per accumulation.
    Random states move on from one pass to the next, so that branches taken at random show.
    """
    found: list[list[str]] = []
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda _, name=name: found[-1].append(name)) for name, p in named]

    def of_ranks() -> list[Any]:
        model.zero_grad(set_to_none=True)
        found.append([])
        trial_step().backward()
        return mesh.gather_objects((found, before.may_run_otherwise()))

    try:
        with without_trace(model) as before:
            passes = of_ranks()
            if any(may_differ for _, may_differ in passes):
                passes = of_ranks()
    finally:
        for hook in hooks:
            hook.remove()
    return [of_rank for of_rank, _ in passes]


# ---------------------------------------------------------------------------------------------- compression


def _compression(mesh: Mesh) -> tuple[Hook | None, Any, list[str]]:
    """The communication hook that the plan asks for, its state, and the reasons; None: a plain mean."""
    plan = mesh.plan
    if plan.agreement.name == "adasum":
        reason = f"gradients of {mesh.copies} copies are combined by Adasum, layer by layer: not the mean, so not one device's"
        return adasum_hook, None, [reason]
    if plan.compression == "none":
        return None, None, []
    if plan.compression == "powersgd":
        reason = (
            f"gradients travel as PowerSGD factors of rank {plan.powersgd_rank} from step {plan.powersgd_start_step} on: "
            "fewer bytes, inexact"
        )
        return powerSGD_hook, _power_sgd_state(plan, mesh), [reason]
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[plan.compression]
    return hook, None, [f"gradients travel as {plan.compression}: half the bytes of float32, inexact"]


def _power_sgd_state(plan: Plan, mesh: Mesh) -> PowerSGDState:
    return PowerSGDState(
        process_group=mesh.data_group,
        matrix_approximation_rank=plan.powersgd_rank,
        start_powerSGD_iter=plan.powersgd_start_step,
    )


def _power_sgd_of(model: nn.Module) -> Any:
    reducer = _REDUCERS.get(model)
    return None if reducer is None else reducer.state


_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


def hook_state(model: nn.Module) -> dict[str, Any] | None:
    """The state of PowerSGD between steps: nested dicts of tensors and plain numbers; None without PowerSGD.

    It differs between ranks (each has the compression error of its own gradients), so a checkpoint saves one per rank.
    """
    state = _power_sgd_of(model)
    if state is None:
        return None
    kind, keys, position, has_gauss, gauss = state.rng.get_state()
    generator = {"kind": kind, "keys": torch.tensor(keys.astype(np.int64)), "position": position, "has_gauss": has_gauss,
              "gauss": gauss}  # fmt: skip
    tensors = {name: {str(bucket): t.clone() for bucket, t in getattr(state, name).items()} for name in _TENSORS}
    return {**tensors, **{name: int(getattr(state, name)) for name in _NUMBERS}, "generator": generator}


def load_hook_state(model: nn.Module, saved: dict[str, Any] | None) -> None:
    """Load what `hook_state` returned on the same rank of as many ranks.

    ValueError: the checkpoint has PowerSGD state and this run does not compress by PowerSGD, or the other way round.
    """
    state = _power_sgd_of(model)
    if (state is None) != (saved is None):
        has, wants = ("none", "one") if saved is None else ("one", "none")
        raise ValueError(
            f"the checkpoint has {has} PowerSGD state and this run wants {wants}; "
            f"set gradient.compression={'none' if saved is None else 'powersgd'} to go on as it began"
        )
    if state is None or saved is None:
        return
    device = next(model.parameters()).device
    for name in _TENSORS:
        setattr(state, name, {int(bucket): t.to(device, copy=True) for bucket, t in saved[name].items()})
    for name in _NUMBERS:
        setattr(state, name, saved[name])
    generator = saved["generator"]
    keys = generator["keys"].cpu().numpy().astype(np.uint32)
    state.rng.set_state((generator["kind"], keys, generator["position"], generator["has_gauss"], generator["gauss"]))


# ---------------------------------------------------------------------------------------------- cases


def _conv_net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2), norm(5), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


class _Branches(nn.Module):
    """One branch is never used; the other only in every second pass where `sometimes`."""

    passes: Tensor

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.stem, self.side, self.never = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.sometimes = sometimes
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.stem(x)
        return x if self.sometimes and self.passes % 2 else x + self.side(x).tanh()


CASES = [
    Case("batch norm", _conv_net, (7, 2, 6, 5), reason="in . messages? .*: all 9 parameters get one"),
    Case("no batch norm", partial(_conv_net, lambda channels: nn.GroupNorm(1, channels)), (7, 2, 6, 5)),
    Case("many buckets", _conv_net, (7, 2, 6, 5), {"bucket_mib": 1e-4}),
    Case("buckets of a measured size", _conv_net, (7, 2, 6, 5), {"bucket_mib": None}, "gradient.bucket_mib=1: a message takes"),
    Case("accumulation", partial(_conv_net, nn.Identity), (7, 2, 6, 5), {"accumulate": 2}),
    Case("a branch never used", _Branches, (7, 4), reason="2 of 6 .*never.bias"),
    Case("a branch never used, accumulation", _Branches, (7, 4), {"accumulate": 2}, "2 of 6 .*never"),
    Case("a branch used sometimes", partial(_Branches, True), (7, 4), reason="2 of 6 parameters .*never.weight"),
]
