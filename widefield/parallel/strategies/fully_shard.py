"""Fully sharded data parallelism: copies of a model that see samples of their own and share what they remember.

ZeRO-3 and ZeRO-2 are torch's FSDP2: weights, gradients and optimizer state lie in parts (DTensors, cut along their first dim)
and a unit's weights are gathered where it runs; 3 frees them between forward and backward, 2 does not.  ZeRO-1 is `data.py`
with an optimizer that steps a share of the parameters on each rank.  Weights are cut over shard x space; over replicate, parts
are copied (hybrid).  The gradient is the mean over all of these ranks.

FSDP2 asks for more than a model promises: that units are called as they are, and gradients are there on every rank alike; see
`_unit_calls.py`.
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
from widefield.parallel.strategies._row_order import NoDraws, not_row_major
from widefield.parallel.strategies._unit_calls import SENDS_ZEROS, UnitCalls
from widefield.plans import Plan
from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.private_torch.tensors import base_of
from widefield.streaming.api import Streamed

AXIS = "shard"
SECTION = "sharding"
PHASE = Phase.AVERAGE
CHECK_ORDER = 40

_CALLS: WeakKeyDictionary[nn.Module, weakref.ref[UnitCalls]] = WeakKeyDictionary()
"""They hold the model, whose hooks hold them: so neither is held here."""
SMALLEST_BYTES = 2**20
"""A unit of less is gathered with the root: at 100 GB/s its message would take less than its start does (10 us)."""
LARGEST_SHARE = 1 / 8
"""A stage of more of the weights is cut into its blocks: two units, at work and on their way, lie whole beside the parts."""


def is_used(plan: Plan) -> bool:
    """Where copies share weights; stages average gradients themselves, and with ZeRO-1 share the optimizer's state alone."""
    return plan.shard > 1 and plan.stage == 1


def check_plan(plan: Plan) -> None:
    """ValueError: parts to be offloaded that are not there."""
    if plan.sharding.offload and (plan.shard == 1 or plan.sharding.zero == 1):
        why = "mesh.shard=1" if plan.shard == 1 else "sharding.zero=1"
        raise ValueError(
            f"sharding.offload=true keeps parts of weights in the CPU's memory and {why} leaves weights whole; set mesh.shard "
            "with sharding.zero=3, or sharding.offload=false"
        )


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Share weights, gradients and optimizer state of `model` over `mesh.shards`, as far as `plan.sharding` says; the reasons.

    Weights and buffers become rank 0's.  With ZeRO-1, give the optimizer to `share_states`.  With 2 and 3 parameters become new
    objects (DTensors), so make the optimizer afterwards, and every pass, in evaluation too, sends messages that all ranks must
    take part in.
    ValueError: units that are not there, compression of gradients, offload to a CPU from a CPU.
    NotImplementedError: ranks whose gradients reach different parameters; a parameter without dims; in a forward, a weight of
    a unit that is read where the unit is not called, or random numbers for images where weights are in channels last.
    """
    plan = mesh.plan
    _check(mesh)
    if plan.sharding.zero == 1:
        return [*data.apply(model, mesh, trial_step=trial_step), _ways_in_words(mesh)]
    _check_parameters(model)
    units, why = _units(model, plan.sharding.units)
    reasons = data.synchronize(model, mesh) if plan.batch_norm == "synchronized" and mesh.copies > 1 else []
    in_other_order = not_row_major(model)
    _begin_alike(model, mesh)
    reasons += _look(model, mesh, trial_step)
    watched = watch(model)
    _shard(model, [units[name] for name in sorted(units, key=lambda name: -name.count("."))], mesh)
    calls = UnitCalls(model, {"": model, **units})
    _CALLS[model] = weakref.ref(calls)
    calls.group = mesh.lend_group(calls)
    data.share_rows(model, watched, mesh, calls.group, ended=calls.goes_to)
    watched.around = partial(_whole_or_told, list(units), watched.around)
    if in_other_order and not plan.independent:
        watched.around = NoDraws(in_other_order, watched.around)
    if plan.batch_norm == "broadcast":
        model.register_forward_pre_hook(partial(data.send_buffers, mesh))
    model.register_forward_hook(_rest_after)
    return [*reasons, _ways_in_words(mesh), why]


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward keeps this rank's whole gradients and sends none; for a model that FSDP2 holds."""
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
    """Whether the weights of `model` lie in parts, so that every pass takes all ranks."""
    return isinstance(model, FSDPModule)


# ---------------------------------------------------------------------------------------------- refusing


def _check(mesh: Mesh) -> None:
    plan, asked = mesh.plan, mesh.plan.sharding
    if asked.zero > 1 and plan.compression != "none":
        raise ValueError(
            f"gradient.compression={plan.compression} is for whole copies and sharding.zero={asked.zero} has none; "
            "set gradient.compression=none, or sharding.zero=1"
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
    """`units_of`, or none where the model runs as operations and not module by module: then no module is called by itself."""
    if override_of(model) is None and not isinstance(model, Streamed):
        return units_of(model, patterns)
    way = "a stream" if isinstance(model, Streamed) else "mesh.channel"
    if patterns:
        raise ValueError(
            f"sharding.units={patterns} gathers modules as they are called and with {way} the model runs as operations, "
            "its modules never called; leave sharding.units out"
        )
    return {}, f"weights are gathered in one unit, the whole model: with {way} no module is called by itself"


def units_of(model: nn.Module, patterns: list[str] | None) -> tuple[dict[str, nn.Module], str]:
    """The modules whose weights are gathered and freed together, by name, and why; what is in none goes with the model.

    patterns: names or patterns of modules; None chooses stages and blocks, of at least SMALLEST_BYTES.
    A module is no unit where one of its weights is used elsewhere too.  ValueError: a pattern that no module fits.
    """
    if patterns is None:
        names = list(_chosen(model))
        why = f"chosen are stages and blocks of {SMALLEST_BYTES / 2**20:g} MiB or more"
    else:
        names = picked(model, patterns, field="sharding.units")
        why = f"as sharding.units={patterns} says"
    modules = dict(model.named_modules())
    apart = [name for name in dict.fromkeys(names) if _is_apart(model, name)]
    left = len(set(names)) - len(apart)
    told = f"; {left} more share weights with other modules and go with the rest" if left else ""
    units = f"{len(apart)} units ({some(apart)}) and the rest" if apart else "one unit, the whole model"
    return {name: modules[name] for name in apart}, f"weights are gathered in {units}: {why}{told}"


def _chosen(model: nn.Module) -> Iterator[str]:
    """Walk down from the model until parts are small enough, through containers and what mostly consists of them."""
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
    """Whether to make units of a module's children: of blocks earlier than of single layers."""
    own = _bytes(module)
    if not isinstance(module, CONTAINERS):
        in_containers = sum(_bytes(child) for child in module.children() if isinstance(child, CONTAINERS))
        return own > max(SMALLEST_BYTES, LARGEST_SHARE * whole) and in_containers > own / 2
    in_blocks = sum(_bytes(child) for child in module.children() if any(child.children()))
    return own > max(SMALLEST_BYTES, (LARGEST_SHARE if in_blocks > own / 2 else 0.5) * whole)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _is_apart(model: nn.Module, name: str) -> bool:
    """Whether a module has weights, and every way from the model to one of them leads through it."""
    own = {id(parameter) for parameter in model.get_submodule(name).parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return bool(own) and all(path.startswith(f"{name}.") for path, parameter in everywhere if id(parameter) in own)


# ---------------------------------------------------------------------------------------------- sharding


def _begin_alike(model: nn.Module, mesh: Mesh) -> None:
    """Weights and buffers of rank 0 on all ranks; weights dense in row order, which is all that FSDP2 takes."""
    for parameter in model.parameters():
        parameter.data = parameter.detach().contiguous()
    data.begin_alike(model, mesh)


def _look(model: nn.Module, mesh: Mesh, trial_step: Callable[[], Tensor] | None) -> list[str]:
    """Two trial passes on every rank; NotImplementedError where ranks reach different parameters and this torch cannot."""
    if trial_step is None or SENDS_ZEROS:
        return []
    of_ranks = mesh.gather_objects(data.trial_passes(model, trial_step, 2))
    for rank, found in enumerate(of_ranks):
        for first, here in zip(map(set, of_ranks[0]), map(set, found), strict=True):
            if first != here:
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


def _whole_or_told(
    units: list[str], around: Callable | None, model: nn.Module, run: Callable, args: tuple, kwargs: dict
) -> Any:
    """The forward; NotImplementedError where it reads a weight of a unit while that lies in parts."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(found)):  # as torch makes of parts with numbers alone
            raise _of_a_part(model, units)
        return found

    try:
        return plain(*args, **kwargs) if around is None else around(model, plain, args, kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise _of_a_part(model, units) from error


def _of_a_part(model: nn.Module, units: list[str]) -> NotImplementedError:
    return NotImplementedError(
        f"{type(model).__qualname__} reads a weight of which each rank has a part: that of one of its {len(units)} units "
        f"({some(units)}) while the unit itself is not called, or any after a gradient through a unit that the forward "
        "takes; set sharding.units so that this layer is no unit of its own and goes with the model, or set "
        "sharding.zero=1"
    )


def _no_view(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A copy of what is a view: a write to a view would take FSDP2's hook away, so it warns of every one."""
    if not torch.is_grad_enabled():
        return None
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and base_of(leaf) is not None else leaf, output)


def _rest_after(model: nn.Module, inputs: Any, output: Any) -> None:
    """After a pass without a backward, which would have freed them, give back gathered weights: names lead to parts again."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _ways_in_words(mesh: Mesh) -> str:
    plan = mesh.plan
    ways = plan.shard * mesh.grid.size
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}
    hybrid = f", {plan.replicate} times over" if plan.replicate > 1 else ""
    where = ", in the CPU's memory" if plan.sharding.offload else ""
    return f"ZeRO-{plan.sharding.zero}: {ways} ranks share {what[plan.sharding.zero]}{hybrid}{where}"


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
