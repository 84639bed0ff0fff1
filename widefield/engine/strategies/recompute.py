"""What a rank remembers of a forward pass: blocks that keep their input alone are run again in the backward; the rest may go
to the CPU's memory meanwhile.

A block becomes a subclass of its class whose training passes run through torch.utils.checkpoint (non-reentrant), so that
objects and names stay.  It is run again as it was run: with the random state, the autocast and the buffers it found, on
copies of these, so that running statistics move once.  It is run to its end on every rank, so that messages inside (of
tiles, of synchronized statistics) come in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from widefield.config import RecomputeConfig
from widefield.engine.layout import Layout
from widefield.engine.mesh import Mesh
from widefield.engine.strategies import Case, Phase, data
from widefield.engine.strategies._pick import CONTAINERS, picked, some
from widefield.engine.strategies._saved import fewest
from widefield.engine.tiled import TiledTensor, wrap_view
from widefield.engine.wrapping import Wrapping, wrap_class

PHASE = Phase.KEEP
SMALLEST_BYTES = 1024
"""What is smaller stays on the device: a message of its own would cost more than its room."""

_KEEP = "_widefield_keep"
_aten = torch.ops.aten
COSTLY = {
    _aten.convolution.default, _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default,
}  # fmt: skip
"""Operations whose results `keep: convolutions` keeps."""


Found = list[tuple[nn.Module, str, Tensor]]
"""Buffers: the module that has one, its name there, and its value."""


def apply(model: nn.Module, mesh: Mesh, *, rehearse: Callable[[], Tensor] | None = None) -> list[str]:
    """Make blocks of `model` keep their inputs alone in training, as `plan.recompute` says; the reasons.

    rehearse: with `memory`, a pass from which the choice is made; its attribute `share`, where it has one, is what part of a
    training pass it is.
    ValueError: blocks that are not there; a memory into which the pass does not fit; a compiled or a streamed model; offload
    on a CPU.  NotImplementedError: a block whose forward is set on the object.
    """
    asked = mesh.plan.recompute
    assert asked is not None
    _check(model, mesh, asked)
    blocks, why = _named_blocks(model, asked)
    if asked.memory is not None:
        blocks, why = fewest(model, mesh, blocks, asked, rehearse)
    for name in blocks:
        _recompute(model.get_submodule(name), name, asked.keep)
    kept = " and the results of convolutions and matrix products" if asked.keep == "convolutions" else ""
    what = (
        f"{len(blocks)} blocks ({some(blocks)}) keep their input{kept} and run again in the backward" if blocks else "no block"
    )
    reasons = [f"recompute: {what}: {why}"]
    if asked.offload:
        wrap_class(model, _Offloaded)
        reasons.append("offload: activations lie in the CPU's memory until the backward needs them")
    return reasons


def _check(model: nn.Module, mesh: Mesh, asked: RecomputeConfig) -> None:
    if hasattr(model, "_stream"):
        raise ValueError("recompute keeps inputs of blocks and a streamed model keeps none of them; set recompute=null")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            "recompute runs blocks again as Python does and a compiled model has none; set model.compile=false, "
            "or recompute=null"
        )
    if asked.offload and mesh.device.type == "cpu":
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
    """The blocks of a net: modules of several layers, inside of which there is no list that most of their weights lie in."""
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
    """Put before a block's class: its passes with gradients keep the inputs and run again in the backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(_run_recomputed)(self, run, args, kwargs)
        return _run_recomputed(self, run, args, kwargs)


class _Offloaded(Wrapping):
    """Put before a model's class: what its passes save for the backward lies in the CPU's memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with saved_tensors_hooks(to_host, from_host):
            return super().forward(*args, **kwargs)


def _run_recomputed(block: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a block that keeps its inputs alone.  All of it runs again, so that every rank sends the same messages.

    `early_stop` is an argument, not torch's switch of the whole process, which threads that run copies set for each other.
    The block's own keywords do not pass through torch's function, which has keywords of the same kind, as `debug`.
    """
    contexts = partial(_contexts, block, vars(block)[_KEEP])
    return checkpoint(partial(run, **kwargs), *args, use_reentrant=False, early_stop=False, context_fn=contexts)


def _contexts(block: nn.Module, keep: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Where a block runs first, and where it runs again."""
    found = [(module, name, value.clone()) for module, name, value in _buffers(block)]
    if keep == "nothing":
        return ExitStack(), _OnCopies(found, ExitStack())
    results = _Results()
    return results, _OnCopies(found, results.again())


class _Results(TorchDispatchMode):
    """Keeps the results of costly operations as a block runs first; `again` gives them back in order.

    A result that the block changes in place afterwards is not what it was, so that operation runs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self.kept.append((_alias(out), out._version))
        return out

    def again(self) -> AbstractContextManager:
        return _Again(self.kept)


def _alias(out: Tensor) -> Tensor:
    """The same values without a history, for autograd is about to make `out` lead to what holds this.

    Below autograd an alias counts in-place changes for itself, unless that is asked for.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # type: ignore[attr-defined]
        return out.detach()


class _Again(TorchDispatchMode):
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
        return func(*args, **(kwargs or {})) if out._version != version else out.detach()


def _buffers(block: nn.Module) -> Found:
    return [
        (module, name, value)
        for module in block.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]  # fmt: skip


class _OnCopies(AbstractContextManager):
    """Inside, the block has copies, dropped afterwards, of the buffers that it found in its first run; to enter repeatedly."""

    def __init__(self, found: Found, inner: AbstractContextManager) -> None:
        self.found, self.inner = found, inner
        self.now: Found = []

    def __enter__(self) -> None:
        self.now = [(module, name, module._buffers[name]) for module, name, _ in self.found]  # type: ignore[misc]
        for module, name, value in self.found:
            module._buffers[name] = value.clone()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        for module, name, buffer in self.now:
            module._buffers[name] = buffer


def _recompute(block: nn.Module, name: str, keep: str) -> None:
    if "forward" in vars(block):
        raise NotImplementedError(
            f"'{name}' ({type(block).__qualname__}) has a forward set on the object, which recompute would bypass; "
            "give its class that forward, or name other recompute.blocks"
        )
    block.__dict__[_KEEP] = keep
    wrap_class(block, _Recomputed)


# ---------------------------------------------------------------------------------------------- to the CPU and back


@dataclass(frozen=True)
class _Away:
    """A tensor, or the tile of a tiled one, in the CPU's memory."""

    values: Tensor
    device: torch.device
    layout: Layout | None


def to_host(tensor: Tensor) -> Any:
    """What autograd keeps in place of an activation; weights, and what is small, stay as they are.

    Small is meant of wholes, so that ranks choose alike.
    """
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    tile = tensor.own if type(tensor) is TiledTensor else tensor
    if isinstance(tensor, nn.Parameter):
        return tensor
    if is_weight or tensor.numel() * tensor.element_size() < SMALLEST_BYTES or type(tile) is not Tensor:
        return tensor.detach()  # a result that is saved as it is would hold the operation that saves it, for ever
    values = torch.empty_like(tile, device="cpu", pin_memory=tile.is_cuda, memory_format=torch.preserve_format)
    values.copy_(tile.detach(), non_blocking=tile.is_cuda)
    return _Away(values, tile.device, tensor.laid if type(tensor) is TiledTensor else None)


def from_host(kept: Any) -> Tensor:
    """The activation again, on its device."""
    if not isinstance(kept, _Away):
        return kept
    tile = kept.values.to(kept.device, non_blocking=True)
    return tile if kept.layout is None else wrap_view(tile, kept.layout)


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


def _as(**options: Any) -> dict[str, Any]:
    return {"recompute": options}


_SHAPE = (7, 2, 6, 5)
CASES = [
    Case("all blocks", _Net, _SHAPE, _as(), r"3 blocks \(stem, stages.0, stages.1\) keep their input and run again"),
    Case("named blocks", _Net, _SHAPE, _as(blocks=["stages"]), r"2 blocks \(stages.0, stages.1\)"),
    Case("convolutions kept", _Net, _SHAPE, _as(keep="convolutions"), "and the results of convolutions and matrix products"),
    Case("accumulation", partial(data._conv_net, nn.Identity), _SHAPE, _as(blocks=["0", "3"]) | {"accumulate": 2}),
    Case("a branch used sometimes", partial(data._Branches, True), (7, 4), _as(blocks=["side"])),
    Case("within a memory", _Net, _SHAPE, _as(memory="13KiB"), "2 blocks .*: as few of 3 blocks as fit 13KiB"),
]
