"""Fully sharded data parallelism (ZeRO): each rank has samples of its own and a shard of the model's state.

ZeRO-3 and ZeRO-2 are torch's FSDP2: weights, gradients and optimizer state are sharded (DTensors, cut along dim 0) and the
weights of a unit are gathered where it runs; 3 frees them between forward and backward, 2 does not.  ZeRO-1 is `data.py` with
an optimizer that steps a part of the parameters on each rank.  Weights are sharded over shard x space and replicated over
replicate (hybrid sharding).  The gradient is the mean over all of these ranks.

FSDP2 assumes that every unit is called as a module and that every rank has the same gradients; `_unit_calls.py` handles models
where that is not so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp import fully_shard as shard_in_place
from torch.distributed.tensor import DTensor

from widefield.capture.interpreter import override_of
from widefield.comm.mesh import Mesh
from widefield.parallel.strategies import Case, Phase, data
from widefield.parallel.strategies._forward_route import watch
from widefield.parallel.strategies._pick import CONTAINERS, picked, some
from widefield.parallel.strategies._row_order import RefuseRandom, not_row_major
from widefield.parallel.strategies._unit_calls import SENDS_ZEROS, UnitCalls
from widefield.plans import Plan
from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.private_torch.tensors import base_of
from widefield.streaming.api import Streamed
from widefield.streaming.storage.memory_pool import is_planned_for_gpu

AXIS = "shard"
SECTION = "sharding"
PHASE = Phase.AVERAGE
CHECK_ORDER = 40

_CALLS: WeakKeyDictionary[nn.Module, weakref.ref[UnitCalls]] = WeakKeyDictionary()
"""Weak on both sides: a UnitCalls refers to its model, and the model's hooks keep the UnitCalls alive."""
SMALLEST_BYTES = 2**20
"""A smaller unit is gathered with the root: at 100 GB/s its message would take less time than its latency (10 us)."""
LARGEST_SHARE = 1 / 8
"""A stage with more of the weights is split into its blocks: two units, the running and the prefetched one, are gathered."""


def is_used(plan: Plan) -> bool:
    """Where mesh.shard is above 1, without stages: pipeline.py averages gradients itself, and allows ZeRO-1 only."""
    return plan.shard > 1 and plan.stage == 1


def check_plan(plan: Plan) -> None:
    """ValueError: sharding.offload where weights are not sharded."""
    if plan.sharding.offload and (plan.shard == 1 or plan.sharding.zero == 1):
        why = "mesh.shard=1" if plan.shard == 1 else "sharding.zero=1"
        raise ValueError(
            f"sharding.offload=true keeps parts of weights in the CPU's memory and {why} leaves weights whole; set mesh.shard "
            "with sharding.zero=3, or sharding.offload=false"
        )


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Shard weights, gradients and optimizer state of `model` over `mesh.shards`, as `plan.sharding` says; returns the reasons.

    Weights and buffers become rank 0's.  With ZeRO-1, pass the optimizer to `share_states`.  With ZeRO-2 and 3, parameters
    become new objects (DTensors), so make the optimizer afterwards; every pass, in evaluation too, is collective.
    ValueError: units that the model does not have, compression of gradients, offload where the device is a CPU.
    NotImplementedError: ranks with gradients for different parameters; a parameter without dims; in a forward, a weight of a
    unit that is read while the unit is not called, or random numbers for images where weights are not row-major.
    """
    plan = mesh.plan
    _check(mesh)
    if plan.sharding.zero == 1:
        return [*data.apply(model, mesh, trial_step=trial_step), _zero_in_words(mesh)]
    _check_parameters(model)
    units, why = _units(model, plan.sharding.units)
    reasons = data.synchronize(model, mesh) if plan.batch_norm == "synchronized" and mesh.copies > 1 else []
    in_other_order = not_row_major(model)
    _broadcast_weights(model, mesh)
    reasons += _check_same_gradients(model, mesh, trial_step)
    watched = watch(model)
    _shard(model, [units[name] for name in sorted(units, key=lambda name: -name.count("."))], mesh)
    calls = UnitCalls(model, {"": model, **units})
    _CALLS[model] = weakref.ref(calls)
    calls.group = mesh.lend_group(calls)
    data.share_batch(model, watched, mesh, calls.group, on_end=calls.check_next)
    watched.around = partial(_refuse_sharded_reads, list(units), watched.around)
    if in_other_order and not plan.independent:
        watched.around = RefuseRandom(in_other_order, watched.around)
    if plan.batch_norm == "broadcast":
        model.register_forward_pre_hook(partial(data.send_buffers, mesh))
    model.register_forward_hook(_reshard_after)
    return [*reasons, _zero_in_words(mesh), why]


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward keeps this rank's full gradients and sends none.  For a model sharded by FSDP2."""
    assert isinstance(model, FSDPModule)
    calls = _CALLS[model]()
    assert calls is not None, "the model's hooks hold them"
    model.set_requires_gradient_sync(False)
    calls.is_on = False
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        calls.is_on = True


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of `model` are sharded by FSDP2, so that every pass is collective."""
    return isinstance(model, FSDPModule)


# ---------------------------------------------------------------------------------------------- refusing


def _check(mesh: Mesh) -> None:
    plan, asked = mesh.plan, mesh.plan.sharding
    if asked.zero > 1 and plan.compression != "none":
        raise ValueError(
            f"gradient.compression={plan.compression} is for whole copies and sharding.zero={asked.zero} has none; "
            "set gradient.compression=none, or sharding.zero=1"
        )
    if asked.offload and is_planned_for_gpu():
        raise NotImplementedError(
            "sharding.offload=true is not planned for GPUs yet: what torch moves between them and the host is not known "
            "without one; measure it there with `widefield bench`, or plan sharding.offload=false, which takes more memory"
        )
    if asked.offload and mesh.device.type == "cpu":
        raise ValueError(
            "sharding.offload=true keeps weights and optimizer state in the CPU's memory and the device is the CPU already; "
            "set sharding.offload=false"
        )


def _check_parameters(model: nn.Module) -> None:
    scalar = next((name for name, parameter in model.named_parameters() if parameter.ndim == 0), None)
    if scalar is not None:
        raise NotImplementedError(
            f"'{scalar}' is a parameter without dims, which has no rows to share out; give it the shape (1,), or set "
            "sharding.zero=1"
        )


# ---------------------------------------------------------------------------------------------- units


def _units(model: nn.Module, patterns: list[str] | None) -> tuple[dict[str, nn.Module], str]:
    """`units_of`, or none where the model runs as a captured graph, whose modules are not called."""
    if override_of(model) is None and not isinstance(model, Streamed):
        return units_of(model, patterns)
    runner = "a stream" if isinstance(model, Streamed) else "mesh.channel"
    if patterns:
        raise ValueError(
            f"sharding.units={patterns} gathers modules as they are called and with {runner} the model runs as operations, "
            "its modules never called; leave sharding.units out"
        )
    return {}, f"weights are gathered in one unit, the whole model: with {runner} no module is called by itself"


def units_of(model: nn.Module, patterns: list[str] | None) -> tuple[dict[str, nn.Module], str]:
    """The modules whose weights are gathered and freed together, by name, and the reason; the root unit has all other weights.

    patterns: names of modules, or patterns as `layer*.*`; None chooses stages and blocks of at least SMALLEST_BYTES.
    A module that shares a weight with another module is no unit.  ValueError: a pattern that no module fits.
    """
    if patterns is None:
        names = list(_chosen(model))
        why = f"chosen are stages and blocks of {SMALLEST_BYTES / 2**20:g} MiB or more"
    else:
        names = picked(model, patterns, field="sharding.units")
        why = f"as sharding.units={patterns} says"
    modules = dict(model.named_modules())
    own_units = [name for name in dict.fromkeys(names) if _has_only_own_weights(model, name)]
    left = len(set(names)) - len(own_units)
    left_in_words = f"; {left} more share weights with other modules and go with the rest" if left else ""
    units = f"{len(own_units)} units ({some(own_units)}) and the rest" if own_units else "one unit, the whole model"
    return {name: modules[name] for name in own_units}, f"weights are gathered in {units}: {why}{left_in_words}"


def _chosen(model: nn.Module) -> Iterator[str]:
    """Descend from the model until modules are small enough, through containers and modules that mostly consist of them."""
    whole = _bytes(model)

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        children = list(module.named_children())
        is_list = module is model or isinstance(module, nn.ModuleList | nn.ModuleDict)
        if children and not isinstance(module, Streamed) and (is_list or _is_too_large(module, whole)):
            for key, child in children:
                yield from walk(f"{name}.{key}" if name else key, child)
        elif _bytes(module) >= SMALLEST_BYTES and module is not model:
            yield name

    return walk("", model)


def _is_too_large(module: nn.Module, whole: int) -> bool:
    """Whether to make units of a module's children.  Blocks become units at a smaller size than single layers do."""
    own = _bytes(module)
    if not isinstance(module, CONTAINERS):
        in_containers = sum(_bytes(child) for child in module.children() if isinstance(child, CONTAINERS))
        return own > max(SMALLEST_BYTES, LARGEST_SHARE * whole) and in_containers > own / 2
    in_blocks = sum(_bytes(child) for child in module.children() if any(child.children()))
    return own > max(SMALLEST_BYTES, (LARGEST_SHARE if in_blocks > own / 2 else 0.5) * whole)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _has_only_own_weights(model: nn.Module, name: str) -> bool:
    """Whether a module has weights, and no module outside of it has one of them too."""
    own = {id(parameter) for parameter in model.get_submodule(name).parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return bool(own) and all(path.startswith(f"{name}.") for path, parameter in everywhere if id(parameter) in own)


# ---------------------------------------------------------------------------------------------- sharding


def _broadcast_weights(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite weights and buffers by those of rank 0, and make weights contiguous, as FSDP2 requires."""
    for parameter in model.parameters():
        parameter.data = parameter.detach().contiguous()
    data.broadcast_weights(model, mesh)


def _check_same_gradients(model: nn.Module, mesh: Mesh, trial_step: Callable[[], Tensor] | None) -> list[str]:
    """Run trial passes.  NotImplementedError: ranks have gradients for different parameters, and this torch needs the same.

    On tiles in space the passes also record what is gathered, so there they run with any torch.
    """
    if trial_step is None or (SENDS_ZEROS and mesh.grid.size == 1):
        return []
    of_ranks = data.trial_passes(model, mesh, trial_step)
    for rank, found in enumerate(of_ranks):
        for first, here in zip(map(set, of_ranks[0]), map(set, found), strict=True):
            if first != here and not SENDS_ZEROS:
                name = sorted(first ^ here)[0]
                raise NotImplementedError(
                    f"torch {torch.__version__} cannot average gradients that only some ranks have where weights lie in parts: "
                    f"in a trial pass {len(first ^ here)} parameters got one on rank 0 or on rank {rank} and not on both "
                    f"({name}); set sharding.zero=1, or take torch 2.15"
                )
    return []


def _shard(model: nn.Module, units: list[nn.Module], mesh: Mesh) -> None:
    asked = mesh.plan.sharding
    offload = CPUOffloadPolicy() if asked.offload else OffloadPolicy()
    for module in [*units, model]:
        module.register_forward_hook(_no_view)  # before FSDP2's own, which looks at what the module gives
        shard_in_place(module, mesh=mesh.shards, reshard_after_forward=asked.zero == 3, offload_policy=offload)


def _refuse_sharded_reads(
    units: list[str], around: Callable | None, model: nn.Module, run: Callable, args: tuple, kwargs: dict
) -> Any:
    """Run the forward; NotImplementedError where it reads a weight of a unit while that is sharded."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(found)):  # torch computes on DTensors without plain tensors
            raise _sharded_read_refusal(model, units)
        return found

    try:
        return plain(*args, **kwargs) if around is None else around(model, plain, args, kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise _sharded_read_refusal(model, units) from error


def _sharded_read_refusal(model: nn.Module, units: list[str]) -> NotImplementedError:
    return NotImplementedError(
        f"{type(model).__qualname__} reads a weight of which each rank has a part: that of one of its {len(units)} units "
        f"({some(units)}) while the unit itself is not called, or any after a gradient through a unit that the forward "
        "takes; set sharding.units so that this layer is no unit of its own and goes with the model, or set "
        "sharding.zero=1"
    )


def _no_view(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copies outputs that are views: an in-place write to a view would remove FSDP2's hook, so FSDP2 warns of every view."""
    if not torch.is_grad_enabled():
        return None
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and base_of(leaf) is not None else leaf, output)


def _reshard_after(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free gathered weights after a pass without gradients, since no backward will: names are those of shards again."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _zero_in_words(mesh: Mesh) -> str:
    plan = mesh.plan
    shards = plan.shard * mesh.grid.size
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}
    hybrid = f", {plan.replicate} times over" if plan.replicate > 1 else ""
    where = ", in the CPU's memory" if plan.sharding.offload else ""
    return f"ZeRO-{plan.sharding.zero}: {shards} ranks share {what[plan.sharding.zero]}{hybrid}{where}"


# ---------------------------------------------------------------------------------------------- cases


def _deep_net() -> nn.Sequential:
    """Channels that 2, 3 and 4 ranks do not divide, one weight in two places, and a stage to be a unit."""
    stage = nn.Sequential(nn.Conv2d(5, 7, 3, padding=1), nn.BatchNorm2d(7), nn.SiLU(), nn.Conv2d(7, 5, 1))
    net = nn.Sequential(nn.Conv2d(2, 5, 3, stride=2), stage, nn.BatchNorm2d(5), nn.SiLU(), nn.Conv2d(5, 5, 1),
                        nn.Conv2d(5, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))  # fmt: skip
    net[5].weight = net[4].weight
    return net


def _sharding(zero: int, units: list[str] | None = None) -> dict[str, Any]:
    return {"sharding": {"zero": zero, "units": units}}


def _frozen_net() -> nn.Module:
    net = _deep_net()
    net[0].weight.requires_grad_(False)
    net[1].requires_grad_(False)
    return net


CASES = [
    Case("ZeRO-3", _deep_net, (7, 2, 6, 5), _sharding(3), "ZeRO-3: . ranks share weights, gradients and optimizer state"),
    Case("ZeRO-3 in units", _deep_net, (7, 2, 6, 5), _sharding(3, ["1", "8"]), r"in 2 units \(1, 8\) and the rest"),
    Case("a unit that shares a weight", _deep_net, (7, 2, 6, 5), _sharding(3, ["1", "4"]), "1 more share weights with other"),
    Case("ZeRO-2", _deep_net, (7, 2, 6, 5), _sharding(2, ["1"]), "ZeRO-2: . ranks share gradients and optimizer state"),
    Case("ZeRO-1", _deep_net, (7, 2, 6, 5), _sharding(1), "ZeRO-1: . ranks share optimizer state"),
    Case("ZeRO-3, accumulation", partial(data._conv_net, nn.Identity), (7, 2, 6, 5), _sharding(3, ["3"]) | {"accumulate": 2}),
    Case("ZeRO-2, accumulation", partial(data._conv_net, nn.Identity), (7, 2, 6, 5), _sharding(2, ["3"]) | {"accumulate": 2}),
    Case("ZeRO-1, accumulation", partial(data._conv_net, nn.Identity), (7, 2, 6, 5), _sharding(1) | {"accumulate": 2}),
    Case("weights that do not learn", _frozen_net, (7, 2, 6, 5), _sharding(3, ["1"])),
    Case("a branch never used", data._Branches, (7, 4), _sharding(3, ["side", "never"])),
    Case("a branch used sometimes", partial(data._Branches, True), (7, 4), _sharding(3, ["side"])),
]
