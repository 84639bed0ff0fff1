"""Tensors that cover a box of a whole, addressed in the whole's coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.geometry.box import Box, is_empty, size_of, within
from widefield.geometry.interval import Interval
from widefield.streaming.storage.offload_buffer import OffloadBuffer
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp

Env = dict[Value, tuple[Tensor, Box]]


class Region:
    """A buffer for the pixels in `box` of a whole, which is read and written in the whole's coordinates.

    is_replicated: whether every rank has the whole; else each has its own pixels.
    """

    def __init__(self, buffer: OffloadBuffer, box: Box, is_replicated: bool = False) -> None:
        self.buffer, self.box, self.is_replicated = buffer, box, is_replicated

    def _moved(self, box: Box) -> Box:
        return tuple(Interval(i.start - o.start, i.stop - o.start) for i, o in zip(box, self.box, strict=True))

    def read(self, box: Box) -> Tensor:
        return self.buffer.read(self._moved(box))

    def write(self, box: Box, tile: Tensor) -> None:
        self.buffer.write(self._moved(box), tile)

    def add(self, box: Box, tile: Tensor) -> None:
        self.buffer.add(self._moved(box), tile)

    def all(self) -> Tensor:
        return self.buffer.whole()

    def free(self) -> None:
        self.buffer.free()


def arguments(
    unit: TracedOp, step: TileOp, env: Mapping[Value, tuple[Tensor, Box]], small: Any, only: Sequence[int] | None = None
) -> list[Tensor]:
    """The tensors that a step reads, or those with the numbers in `only`."""
    numbers = range(len(unit.reads)) if only is None else only
    return [_argument(unit.reads[number], step.reads[number], env, small) for number in numbers]


def _argument(value: Value, box: Box | None, env: Mapping[Value, tuple[Tensor, Box]], small: Any) -> Tensor:
    if value in env:
        return env[value][0] if box is None else crop(*env[value], box)
    if box is not None and is_empty(box):
        return torch.empty(size_of(box), dtype=value.dtype, device=value.device)
    return small[value] if box is None else crop(small[value], all_of(value), box)


def all_of(value: Value) -> Box:
    """The box of all pixels."""
    return tuple(Interval(0, extent) for extent in value.shape)


def crop(tensor: Tensor, box: Box, wanted: Box) -> Tensor:
    """The part `wanted` of a tensor that covers `box`."""
    if box == wanted:
        return tensor
    if is_empty(wanted):
        return tensor.new_empty(size_of(wanted))
    return tensor[within(box, wanted)]


def leaf_of(value: Value, tensor: Tensor) -> Tensor:
    """A window of a stored value as an autograd leaf, if its gradient is wanted."""
    return tensor.detach().requires_grad_() if value.wants_grad else tensor.detach()


def detached_unless_wanted(value: Value, result: Tensor) -> Tensor:
    """A result, detached if the captured module gives it no gradient."""
    return result if value.wants_grad or not result.requires_grad else result.detach()


def merged(unit: TracedOp, parts: Tensor) -> Tensor:
    """The total of a reduction, from the stacked parts of all tiles."""
    return parts.sum(0) if unit.merge is None else unit.merge(parts)


class Leaves:
    """Small values and weights as leaves, the same leaf at each access."""

    def __init__(self, leaf_of: Callable[[Value], Tensor]) -> None:
        self._leaf_of = leaf_of

    def __getitem__(self, value: Value) -> Tensor:
        return self._leaf_of(value)
