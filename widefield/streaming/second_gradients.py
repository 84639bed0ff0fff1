"""Which operations of a stream have no second derivative?  Asked on meta tensors, before a tile runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Node, Value
from widefield.geometry.box import size_of
from widefield.streaming.regions import merged
from widefield.streaming.schedule import TileSchedule
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp

NOT_THERE = ("derivative for", "once_differentiable")
"""Parts of torch's texts where a gradient has no gradient."""


def refuse_without(program: TileSchedule, moved: set[Value]) -> None:
    """NotImplementedError: the gradient of an operation that reads `moved` values has no gradient."""
    key = frozenset(moved)
    if key in program.asked:
        return
    gaps = list(dict.fromkeys(_gaps(program, moved)))
    if gaps:
        raise NotImplementedError(
            f"a loss of a stream's gradients, as a penalty on them, needs second derivatives, and {', '.join(gaps)} "
            f"{'have' if len(gaps) > 1 else 'has'} none in torch; take another operation there, leave it outside of the "
            "stream, or leave the penalty out"
        )
    program.asked.add(key)


def _gaps(program: TileSchedule, moved: set[Value]) -> Iterator[str]:
    totals: dict[Value, Tensor] = {}
    known: set[tuple[Node, bool, bool]] = set()
    for unit, step in _samples(program):
        name, is_moved = (unit.node, unit.part is None, step is None), any(v in moved or v in totals for v in unit.reads)
        if unit.node.draws or not unit.node.grad or not is_moved or name in known:
            continue
        known.add(name)
        if not _has_second_gradient(unit, step, totals):
            yield f"{unit.node.path}'s {unit.node.name}" if unit.node.path else unit.node.name


def _samples(program: TileSchedule) -> Iterator[tuple[TracedOp, TileOp | None]]:
    """Each unit, with its step in tiles that represent all; those that run once have none."""
    for stage in program.stages:
        yield from ((unit, None) for unit in stage.once)
        for segment in stage.segments:
            for place, _ in segment.samples:
                tile = segment.tiles[place]
                yield from tile.steps
                yield from tile.parts


def _has_second_gradient(unit: TracedOp, step: TileOp | None, totals: dict[Value, Tensor]) -> bool:
    """totals: of reductions, filled here.  What cannot run on meta tensors is taken to have one; running it will tell."""
    tensors = [_stand_in(unit, step, number, totals) for number in range(len(unit.reads))]
    call: Any = unit.call if step is None else step.call
    try:
        with torch.enable_grad():
            results = call(tensors)
            if unit.part is not None and unit.outs[0] is not None:
                results = [merged(unit, results[0].unsqueeze(0))]
                totals[unit.outs[0]] = results[0].detach()
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            outs = [out for value, out in zip(unit.outs, results, strict=True) if value is not None and out.requires_grad]
            _differentiate_twice(outs, leaves)
    except Exception as error:  # not every kernel runs on meta tensors
        return not any(text in str(error) for text in NOT_THERE)
    return True


def _differentiate_twice(outs: list[Tensor], leaves: list[Tensor]) -> None:
    if not outs or not leaves:
        return
    ends = [torch.empty_like(out).requires_grad_() for out in outs]
    first = torch.autograd.grad(outs, leaves, ends, create_graph=True, allow_unused=True)
    again = [grad for grad in first if grad is not None and grad.requires_grad]
    if again:
        torch.autograd.grad(again, [*leaves, *ends], [torch.empty_like(grad) for grad in again], allow_unused=True)


def _stand_in(unit: TracedOp, step: TileOp | None, number: int, totals: dict[Value, Tensor]) -> Tensor:
    value = unit.reads[number]
    box = None if step is None else step.reads[number]
    shape, dtype = value.shape if box is None else size_of(box), value.dtype
    if value in totals:
        shape, dtype = tuple(totals[value].shape), totals[value].dtype
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(value.wants_grad)
