"""Activation checkpointing and offloading: blocks save only their input and run again in the backward; what is saved may be
moved to the CPU's memory.

The class of a block becomes a subclass whose training passes run through torch.utils.checkpoint (non-reentrant), so objects and
names stay.  A block runs again with the random state, the autocast and the buffers of its first run, on copies of the buffers,
so that running statistics are updated once.  It runs to its end on every rank, so that messages inside (of tiles, of
synchronized statistics) have the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from widefield.comm.mesh import Mesh
from widefield.config import RecomputeConfig
from widefield.module_wrapping import Wrapping, wrap_class
from widefield.parallel.strategies import Case, Phase, data
from widefield.parallel.strategies._offload import from_host, to_host
from widefield.parallel.strategies._pick import CONTAINERS, picked, some
from widefield.parallel.strategies._saved_tensors import fewest_blocks
from widefield.plans import Plan
from widefield.private_torch.dispatcher import DispatchKey, SetExcludeDispatchKeyGuard, TorchDispatchMode
from widefield.private_torch.modules import buffers_of, compiled_call_impl_of
from widefield.private_torch.pytree import tree_map
from widefield.private_torch.tensors import version_counter
from widefield.streaming.storage.memory_pool import has_own_memory

AXIS = None
SECTION = "recompute"
PHASE = Phase.KEEP
CHECK_ORDER = 30

_KEEP = "_widefield_keep"
_aten = torch.ops.aten
COSTLY = {
    _aten.convolution.default, _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default,
}  # fmt: skip
"""Operations whose results `keep: convolutions` saves."""


Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers: the module that has one, its name there, and its value."""


def is_used(plan: Plan) -> bool:
    """Where the plan has a section `recompute`."""
    return plan.recompute is not None


def check_plan(plan: Plan) -> None:
    """NotImplementedError: mesh.channel or a stream, which run a model as a graph and call no modules."""
    if plan.recompute is not None and (plan.channel > 1 or plan.stream is not None):
        channel, stream = f"mesh.channel={plan.channel}", f"stream (here {plan.stream})"
        other, cure = (channel, "mesh.channel=1") if plan.channel > 1 else (stream, "stream=null")
        raise NotImplementedError(
            f"recompute runs modules again as they were called, and with {other} a model runs as operations, its modules never "
            f"called; set recompute=null, or {cure}"
        )


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Make blocks of `model` save only their inputs in training, as `plan.recompute` says; returns the reasons.

    trial_step: with `recompute.memory`, the pass that is measured; see TrialStep for its attribute `share`.
    ValueError: blocks that the model does not have; a budget that no choice of blocks fits; a compiled or a streamed model;
    offload where the device is a CPU.  NotImplementedError: a block whose forward is set on the object.
    """
    asked = mesh.plan.recompute
    assert asked is not None
    _check(model, mesh, asked)
    blocks, why = _named_blocks(model, asked)
    if asked.memory is not None:
        blocks, why = fewest_blocks(model, mesh, blocks, asked, trial_step)
    for name in blocks:
        _recompute(model.get_submodule(name), name, asked.keep)
    kept = " and the results of convolutions and matrix products" if asked.keep == "convolutions" else ""
    what = (
        f"{len(blocks)} blocks ({some(blocks)}) keep their input{kept} and run again in the backward" if blocks else "no block"
    )
    reasons = [f"recompute: {what}: {why}"]
    if asked.offload:
        wrap_class(model, _Offloaded)
        reasons.append("offload: activations are in the CPU's memory until the backward needs them")
    return reasons


def _check(model: nn.Module, mesh: Mesh, asked: RecomputeConfig) -> None:
    if hasattr(model, "_stream"):
        raise ValueError("recompute keeps inputs of blocks and a streamed model keeps none of them; set recompute=null")
    if compiled_call_impl_of(model) is not None:
        raise ValueError(
            "recompute runs blocks again as Python does and a compiled model has none; set model.compile=false, "
            "or recompute=null"
        )
    if asked.offload and not has_own_memory(mesh.device):
        raise ValueError(
            "recompute.offload=true moves activations to the CPU's memory and the device is the CPU already; "
            "set recompute.offload=false"
        )
    if asked.offload and asked.memory is not None:
        raise ValueError(
            f"recompute.memory={asked.memory} chooses what stays on the device and recompute.offload=true lets nothing stay; "
            "set one of them"
        )


# ---------------------------------------------------------------------------------------------- which blocks


def _named_blocks(model: nn.Module, asked: RecomputeConfig) -> tuple[list[str], str]:
    if asked.blocks is None:
        blocks = list(_blocks("", model))
        if not blocks:
            raise ValueError(
                f"recompute found no blocks in {type(model).__name__}: nothing in it is made of several layers; name modules "
                f"by recompute.blocks, out of: {', '.join(name for name, _ in model.named_children())}"
            )
        return blocks, "all blocks of the model"
    names = picked(model, asked.blocks, field="recompute.blocks")
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return outermost, f"as recompute.blocks={asked.blocks} says"


def _blocks(name: str, module: nn.Module) -> Iterator[str]:
    """The names of a net's blocks: modules of several layers that are not mostly lists of other blocks."""
    children = list(module.named_children())
    if not children:
        return
    if name and not isinstance(module, nn.ModuleList | nn.ModuleDict) and not _is_list_of_blocks(module):
        yield name
        return
    for key, child in children:
        yield from _blocks(f"{name}.{key}" if name else key, child)


def _is_list_of_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return any(any(child.children()) for child in module.children())
    inside = sum(_size(child) for child in module.children() if isinstance(child, CONTAINERS))
    return inside > _size(module) / 2


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---------------------------------------------------------------------------------------------- running again


class _Recomputed(Wrapping):
    """Put before a block's class: its passes with gradients save the inputs and run again in the backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run_recomputed)(self, run, args, kwargs)
        return _run_recomputed(self, run, args, kwargs)


class _Offloaded(Wrapping):
    """Put before a model's class: what its passes save for the backward is moved to the CPU's memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with saved_tensors_hooks(to_host, from_host):
            return super().forward(*args, **kwargs)


def _run_recomputed(block: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a block that saves only its inputs.  All of it runs again, so that every rank sends the same messages.

    `early_stop` is passed as an argument: torch's context manager for it is global, and several threads may run copies.
    The block's keywords are bound here, because `checkpoint` has keywords of its own, as `debug`.
    """
    contexts = partial(_contexts, block, vars(block)[_KEEP])
    saved_args, saved_kwargs = _own_containers((args, kwargs))
    passes = _Passes(run, (args, kwargs), saved_kwargs)
    return checkpoint(passes, *saved_args, use_reentrant=False, early_stop=False, context_fn=contexts)


class _Passes:
    """Runs a block: first with the lists and dicts that its caller gave, afterwards with what was in them then.

    A caller may go on filling a list that it has given to a block, as a dense block does with its features.
    """

    def __init__(self, run: Callable[..., Any], given: tuple[tuple, dict[str, Any]], kwargs: dict[str, Any]) -> None:
        self.run, self.kwargs = run, kwargs
        self.given: tuple[tuple, dict[str, Any]] | None = given

    def __call__(self, *args: Any) -> Any:
        args, kwargs = self.given or _own_containers((args, self.kwargs))
        self.given = None
        return self.run(*args, **kwargs)


def _own_containers(arguments: tuple[tuple, dict[str, Any]]) -> tuple[tuple, dict[str, Any]]:
    """The same arguments in lists, tuples and dicts of their own."""
    return tree_map(lambda leaf: leaf, arguments)


def _contexts(block: nn.Module, keep: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts in which a block runs first, and runs again."""
    found = [(module, name, value.clone()) for module, name, value in _buffers(block)]
    if keep == "nothing":
        return ExitStack(), _OnCopies(found, ExitStack())
    results = _SavedResults()
    return results, _OnCopies(found, results.replay())


class _SavedResults(TorchDispatchMode):
    """Saves the results of costly operations as a block runs first; `replay` returns them in order.

    A result that the block changes in place afterwards is no longer valid, so that operation runs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self.kept.append((_alias(out), version_counter(out)))
        return out

    def replay(self) -> AbstractContextManager:
        return _Replay(self.kept)


def _alias(out: Tensor) -> Tensor:
    """The same values without autograd history: with it, saved results and graph would keep each other alive.

    Below autograd, a detached tensor has a version counter of its own unless this dispatch key is included.
    """
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):  # type: ignore[attr-defined]
        return out.detach()


class _Replay(TorchDispatchMode):
    def __init__(self, kept: list[tuple[Tensor, int]]) -> None:
        super().__init__()
        self.kept, self.number = kept, 0

    def __enter__(self) -> Any:
        self.number = 0  # with retain_graph a block runs again more than once
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func not in COSTLY:
            return func(*args, **(kwargs or {}))
        out, version = self.kept[self.number]
        self.number += 1
        return func(*args, **(kwargs or {})) if version_counter(out) != version else out.detach()


def _buffers(block: nn.Module) -> Buffers:
    return [
        (module, name, value)
        for module in block.modules()
        for name, value in buffers_of(module).items()
        if value is not None
    ]  # fmt: skip


class _OnCopies(AbstractContextManager):
    """Inside, the block has copies of the buffers of its first run, which are dropped afterwards.  Reusable."""

    def __init__(self, found: Buffers, inner: AbstractContextManager) -> None:
        self.found, self.inner = found, inner
        self.now: Buffers = []

    def __enter__(self) -> None:
        self.now = [(module, name, buffers_of(module)[name]) for module, name, _ in self.found]  # type: ignore[misc]
        for module, name, value in self.found:
            buffers_of(module)[name] = value.clone()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        for module, name, buffer in self.now:
            buffers_of(module)[name] = buffer


def _recompute(block: nn.Module, name: str, keep: str) -> None:
    if "forward" in vars(block):
        raise NotImplementedError(
            f"'{name}' ({type(block).__qualname__}) has a forward set on the object, which recompute would bypass; "
            "give its class that forward, or name other recompute.blocks"
        )
    block.__dict__[_KEEP] = keep
    wrap_class(block, _Recomputed)


# ---------------------------------------------------------------------------------------------- cases


class _Net(nn.Module):
    """Blocks with BatchNorm in a list and in a sequence, one with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(_Block(4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu_()


class _DenseNet(nn.Module):
    """Layers that take a list of all earlier features, which grows after their call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_OnList(2 + 3 * number) for number in range(3))
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class _OnList(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(self.norm(torch.cat(features, 1)).relu_())


def _as(**options: Any) -> dict[str, Any]:
    return {"recompute": options}


_SHAPE = (7, 2, 6, 5)
CASES = [
    Case("all blocks", _Net, _SHAPE, _as(), r"3 blocks \(stem, stages.0, stages.1\) keep their input and run again"),
    Case("named blocks", _Net, _SHAPE, _as(blocks=["stages"]), r"2 blocks \(stages.0, stages.1\)"),
    Case("convolutions kept", _Net, _SHAPE, _as(keep="convolutions"), "and the results of convolutions and matrix products"),
    Case("accumulation", partial(data._conv_net, nn.Identity), _SHAPE, _as(blocks=["0", "3"]) | {"accumulate": 2}),
    Case("a branch used sometimes", partial(data._Branches, True), (7, 4), _as(blocks=["side"])),
    Case("a list that grows", _DenseNet, _SHAPE, _as(blocks=["layers"]), r"3 blocks"),
    Case("within a memory", _Net, _SHAPE, _as(memory="13KiB"), "2 blocks .*: as few of 3 blocks as fit 13KiB"),
]
