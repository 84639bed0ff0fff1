"""Data parallelism by torch's DistributedDataParallel: a whole copy of the model per rank, gradients averaged in buckets.

What DDP wants to be told is found out by trial passes: whether every parameter gets a gradient, and whether the graph stays
the same.  Two more passes through DDP let it order its buckets before the first step, so that a resumed run adds numbers up
in the order of one that never stopped: from 3 ranks on that decides the last bits.

A rank whose gradients differ in which parameters they reach raises one step later, in DDP's words.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from widefield.engine.mesh import Mesh
from widefield.engine.normalization import SyncBatchNorm, broadcast_buffers
from widefield.engine.strategies import Case, Phase
from widefield.engine.strategies._adasum import adasum_hook
from widefield.engine.strategies._buckets import bucket_mib
from widefield.engine.strategies._route import inside, route, wrapper_of
from widefield.plan import Plan

PHASE = Phase.AVERAGE
_STATE = "_widefield_hook_state"


def apply(model: nn.Module, mesh: Mesh, *, rehearse: Callable[[], Tensor] | None = None) -> list[str]:
    """Make training passes of `model` average their gradients over `mesh.data_group`; the reasons for each choice.

    The gradient is the mean over ranks, so a loss summed over this rank's samples wants the factor copies / samples of all.
    Weights and buffers become rank 0's.  Without `rehearse` no parameter may be left out of a pass (DDP then raises),
    and the first step's buckets are not the later ones'.
    """
    plan = mesh.plan
    reasons = []
    if plan.batch_norm == "synchronized" and mesh.copies > 1:  # tiles of one image share statistics by the engine's rules
        reasons += synchronize(model, mesh)
    if plan.batch_norm_group > 1:
        reasons += _share_statistics(model, mesh)
    broadcast_buffers(model, mesh)  # SyncBatchNorm's trial pass wants them equal, and DDP before 2.13 leaves them out
    flags, why = _find_flags(model, mesh, rehearse)
    size, measured = bucket_mib(model, mesh)
    wrapper = DistributedDataParallel(
        inside(model),
        process_group=mesh.data_group,
        bucket_cap_mb=size,
        gradient_as_bucket_view=True,
        **flags,
        **_buffer_flag(plan.batch_norm == "broadcast"),
    )
    route(model, wrapper)
    if rehearse is not None:  # DDP orders its buckets after one pass, with a static graph after two
        trial_passes(model, rehearse, 2)
    return [*reasons, why, *measured, *_compress(model, wrapper, mesh)]


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients and sends nothing: every pass of a step but the last runs here.

    Forward and backward both belong inside.  Does nothing for a model that is not laid out by this strategy.
    """
    wrapper = wrapper_of(model)
    return wrapper.no_sync() if isinstance(wrapper, DistributedDataParallel) else nullcontext()


def synchronize(model: nn.Module, mesh: Mesh) -> list[str]:
    """Give every BatchNorm the statistics of the whole batch; the reason.  NotImplementedError: one that cannot have them."""
    SyncBatchNorm.convert(model, mesh.statistics_group, alike=mesh.grid.size)
    count = sum(isinstance(layer, SyncBatchNorm) for layer in model.modules())
    return [
        f"BatchNorm: {count} layers share their statistics over {mesh.data_size} ranks, so that the numbers are one device's"
    ] * (count > 0)


def _share_statistics(model: nn.Module, mesh: Mesh) -> list[str]:
    """Give the BatchNorms of neighbouring copies common statistics; every rank makes all the groups of ranks."""
    each = mesh.plan.batch_norm_group
    group, _ = dist.new_subgroups_by_enumeration([list(range(first, first + each)) for first in range(0, mesh.size, each)])
    SyncBatchNorm.convert(model, group)
    return [
        f"BatchNorm: statistics are those of {each} neighbouring copies of {mesh.copies}; running statistics are averaged once "
        "per epoch"
    ]


def _buffer_flag(every_forward: bool) -> dict[str, bool]:
    """DDP's switch for sending rank 0's buffers before each pass, under the name that this torch has for it."""
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": every_forward}


# ---------------------------------------------------------------------------------------------- trial passes


def _find_flags(model: nn.Module, mesh: Mesh, rehearse: Callable[[], Tensor] | None) -> tuple[dict[str, bool], str]:
    """DDP's static_graph and find_unused_parameters, from two trial passes, the same on every rank; and the reason."""
    if rehearse is None:
        return {}, "plain DDP: no trial pass was given, so every parameter is expected to get a gradient in every pass"
    found = [used for of_rank in mesh.gather_objects(trial_passes(model, rehearse, 2)) for used in of_rank]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = [name for name in trainable if not all(name in used for used in found)]
    if any(used != found[0] for used in found):
        return {"find_unused_parameters": True}, (
            f"find_unused_parameters: {len(unused)} of {len(trainable)} parameters get gradients in some trial passes and "
            f"not in others ({_some(unused)})"
        )
    which = f"all {len(trainable)} parameters get gradients" if not unused else (
        f"{len(unused)} of {len(trainable)} parameters never get gradients ({_some(unused)}) and the others always do"
    )  # fmt: skip
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    if mesh.grid.size > 1 and compiled and not unused:  # its graph would begin with a clone that a compiler cannot trace
        return {}, f"plain DDP: {which}, but a static graph cannot be compiled together with tiles in space"
    if mesh.plan.accumulate == 1:
        return {"static_graph": True}, f"static graph: {which}, in two trial passes on {mesh.size} ranks"
    why = f"gradient.accumulate={mesh.plan.accumulate} leaves out messages, which DDP's static graph cannot"
    if unused:
        return {"find_unused_parameters": True}, f"find_unused_parameters: {which}, and {why}"
    return {}, f"plain DDP: {which}, but {why}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def trial_passes(model: nn.Module, rehearse: Callable[[], Tensor], count: int) -> list[set[str]]:
    """Forward and backward `count` times, leaving no trace; the names of the parameters that got gradients each time.

    Random states move on from one pass to the next, so that a branch taken by chance shows.
    """
    found = []
    with without_trace(model):
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            rehearse().backward()
            found.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})
    return found


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Buffers, random states and training flags come back as they were; gradients are None after."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    training = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        model.zero_grad(set_to_none=True)
        for buffer, before in buffers:
            buffer.detach().copy_(before)
        for module, flag in training:
            module.training = flag


# ---------------------------------------------------------------------------------------------- compression


def _compress(model: nn.Module, wrapper: DistributedDataParallel, mesh: Mesh) -> list[str]:
    """Register the plan's way for gradients to travel; after the trial pass, so that no state remembers it."""
    plan = mesh.plan
    if plan.agreement == "adasum":
        wrapper.register_comm_hook(mesh.data_group, adasum_hook)
        return [f"gradients of {mesh.copies} copies are combined by Adasum, layer by layer: not the mean, so not one device's"]
    if plan.compression == "none":
        return []
    if plan.compression == "powersgd":
        state = _power_sgd_state(plan, mesh)
        model.__dict__[_STATE] = state
        wrapper.register_comm_hook(state, powerSGD_hook)
        return [
            f"gradients travel as PowerSGD factors of rank {plan.powersgd_rank} from step {plan.powersgd_start_step} on: "
            "fewer bytes, inexact"
        ]
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[plan.compression]
    wrapper.register_comm_hook(mesh.data_group, hook)
    return [f"gradients travel as {plan.compression}: half the bytes of float32, inexact"]


def _power_sgd_state(plan: Plan, mesh: Mesh) -> PowerSGDState:
    return PowerSGDState(
        process_group=mesh.data_group,
        matrix_approximation_rank=plan.powersgd_rank,
        start_powerSGD_iter=plan.powersgd_start_step,
    )


_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


def hook_state(model: nn.Module) -> dict[str, Any] | None:
    """What gradient compression carries from step to step: nested dicts of tensors and plain numbers; None without PowerSGD.

    Each rank has its own (the error its own gradients lost), so a checkpoint keeps one per rank.
    """
    state = vars(model).get(_STATE)
    if state is None:
        return None
    kind, keys, position, has_gauss, gauss = state.rng.get_state()
    generator = {"kind": kind, "keys": torch.tensor(keys.astype(np.int64)), "position": position, "has_gauss": has_gauss,
              "gauss": gauss}  # fmt: skip
    tensors = {name: {str(bucket): t.clone() for bucket, t in getattr(state, name).items()} for name in _TENSORS}
    return {**tensors, **{name: int(getattr(state, name)) for name in _NUMBERS}, "generator": generator}


def load_hook_state(model: nn.Module, saved: dict[str, Any] | None) -> None:
    """Put back what `hook_state` gave on the same rank of as many ranks.

    ValueError where one of the two runs compresses by PowerSGD and the other does not.
    """
    state = vars(model).get(_STATE)
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
    Case("batch norm", _conv_net, (7, 2, 6, 5), reason="static graph: all 9 parameters"),
    Case("no batch norm", partial(_conv_net, lambda channels: nn.GroupNorm(1, channels)), (7, 2, 6, 5)),
    Case("many buckets", _conv_net, (7, 2, 6, 5), {"bucket_mib": 1e-4}),
    Case("buckets of a measured size", _conv_net, (7, 2, 6, 5), {"bucket_mib": None}, "gradient.bucket_mib=1: a message takes"),
    Case("accumulation", partial(_conv_net, nn.Identity), (7, 2, 6, 5), {"accumulate": 2}, "plain DDP: .*accumulate=2"),
    Case("a branch never used", _Branches, (7, 4), reason="static graph: 2 of 6 .*never.bias"),
    Case("a branch never used, accumulation", _Branches, (7, 4), {"accumulate": 2}, "find_unused_parameters: 2 of 6 .*never"),
    Case("a branch used sometimes", partial(_Branches, True), (7, 4), reason="find_unused_parameters: 4 of 6 .*some trial"),
]
