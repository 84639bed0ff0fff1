"""How many bytes does a pass save for its backward, and which blocks must be recomputed for them to fit a budget?"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from widefield.comm.mesh import Mesh
from widefield.config import RecomputeConfig
from widefield.parallel.strategies._forward_state import without_trace
from widefield.quantity import read_memory
from widefield.tiled.tensor import TiledTensor


@dataclass
class Costs:
    """Bytes that a pass of this rank saves for its backward: inside of each block, as each block's input, and elsewhere."""

    inside: dict[str, int]
    inputs: dict[str, int]
    outside: int = 0

    def peak_bytes(self, chosen: list[str]) -> int:
        """The peak in the backward where the blocks `chosen` are recomputed, one at a time."""
        saved = sum(size for name, size in self.inside.items() if name not in chosen)
        rerun = max((self.inside[name] for name in chosen), default=0)
        return self.outside + saved + sum(self.inputs[name] for name in chosen) + rerun

    def times(self, factor: float) -> Costs:
        inside, inputs = (
            {name: math.ceil(size * factor) for name, size in sizes.items()} for sizes in (self.inside, self.inputs)
        )
        return Costs(inside, inputs, math.ceil(self.outside * factor))


def costs_of(model: nn.Module, blocks: list[str], trial_step: Callable[[], Tensor]) -> Costs:
    """Measure a trial forward: the bytes that autograd would save, each storage once, without parameters and buffers."""
    costs, stack = Costs(dict.fromkeys(blocks, 0), dict.fromkeys(blocks, 0)), [""]
    seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}

    def enter(name: str, block: nn.Module, args: tuple) -> None:
        stack.append(name)
        costs.inputs[name] += sum(_tile(arg).nbytes for arg in args if isinstance(arg, Tensor))

    def note(tensor: Tensor) -> None:
        reference = StorageWeakRef(_tile(tensor).untyped_storage())
        if reference in seen:
            return
        seen.add(reference)
        if stack[-1]:
            costs.inside[stack[-1]] += _tile(tensor).untyped_storage().nbytes()
        else:
            costs.outside += _tile(tensor).untyped_storage().nbytes()

    with ExitStack() as hooks, without_trace(model):
        for name in blocks:
            block = model.get_submodule(name)
            hooks.callback(block.register_forward_pre_hook(partial(enter, name)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: stack.pop() and None).remove)
        with saved_tensors_hooks(note, _never):
            trial_step()
    return costs


def _tile(tensor: Tensor) -> Tensor:
    return tensor.local if type(tensor) is TiledTensor else tensor


def _never(_: Any) -> Tensor:
    raise AssertionError("a pass that is measured has no backward")


def fewest_blocks(
    model: nn.Module, mesh: Mesh, blocks: list[str], asked: RecomputeConfig, trial_step: Callable[[], Tensor] | None
) -> tuple[list[str], str]:
    """The fewest of `blocks` whose recomputing keeps saved tensors within `asked.memory`, the same on every rank; and why.

    ValueError: no trial step, or no choice fits.
    """
    if trial_step is None:
        raise ValueError("recompute.memory is kept by looking at a trial pass and none was given; name recompute.blocks")
    factor = 1 / getattr(trial_step, "share", 1.0)
    of_ranks = [costs.times(factor) for costs in mesh.gather_objects(costs_of(model, blocks, trial_step))]
    budget = read_memory(asked.memory)
    saving = {name: max(costs.inside[name] - costs.inputs[name] for costs in of_ranks) for name in blocks}
    order = sorted((name for name in blocks if saving[name] > 0), key=lambda name: -saving[name])
    needs = [max(costs.peak_bytes(order[:count]) for costs in of_ranks) for count in range(len(order) + 1)]
    fitting = [count for count, need in enumerate(needs) if need <= budget]
    if not fitting:
        raise ValueError(
            f"a training pass keeps {_mib(needs[0])} and, with {len(order)} of its blocks run again, {_mib(min(needs))}, which "
            f"recompute.memory={asked.memory} does not hold; set gradient.accumulate higher, a smaller data.batch_size, more "
            "memory, or recompute.offload=true in its place"
        )
    count = fitting[0]
    chosen = [name for name in blocks if name in order[:count]]
    why = (
        f"as few of {len(blocks)} blocks as fit {asked.memory}: a pass keeps {_mib(needs[count])}, and {_mib(needs[0])} without"
    )
    return chosen, why


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
