"""Tensors and the boxes of a whole that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The pixels of a box of a whole, which are read and written in the whole's coordinates.

    is_replicated: whether every rank has the whole; where not, each has its own pixels.
    """

    def __init__(self, kept: OffloadBuffer, box: Box, is_replicated: bool = False) -> None:
        self.kept, self.box, self.is_replicated = kept, box, is_replicated

    def _moved(self, box: Box) -> Box:
        return tuple(Interval(i.start - o.start, i.stop - o.start) for i, o in zip(box, self.box, strict=True))

    def read(self, box: Box) -> Tensor:
        return self.kept.read(self._moved(box))

    def write(self, box: Box, tile: Tensor) -> None:
        self.kept.write(self._moved(box), tile)

    def add(self, box: Box, tile: Tensor) -> None:
        self.kept.add(self._moved(box), tile)

    def all(self) -> Tensor:
        return self.kept.whole()

    def free(self) -> None:
        self.kept.free()


def arguments(
    unit: TracedOp, step: TileOp, env: Mapping[Value, tuple[Tensor, Box]], small: Any, only: Sequence[int] | None = None
) -> list[Tensor]:
    """The tensors that a step reads, or those of them that are asked for."""
    numbers = range(len(unit.reads)) if only is None else only
    return [_argument(unit.reads[number], step.reads[number], env, small) for number in numbers]


def _argument(value: Value, box: Box | None, env: Mapping[Value, tuple[Tensor, Box]], small: Any) -> Tensor:
    if value in env:
        return env[value][0] if box is None else crop(*env[value], box)
    if box is not None and is_empty(box):
        return torch.empty(size_of(box), dtype=value.dtype, device=value.device)
    return small[value] if box is None else crop(small[value], all_of(value), box)


def all_of(value: Value) -> Box:
    """Every pixel."""
    return tuple(Interval(0, extent) for extent in value.shape)


def crop(tensor: Tensor, box: Box, wanted: Box) -> Tensor:
    """The wanted box out of a tensor that holds `box`."""
    if box == wanted:
        return tensor
    if is_empty(wanted):
        return tensor.new_empty(size_of(wanted))
    return tensor[within(box, wanted)]


def leaf_window(value: Value, tensor: Tensor) -> Tensor:
    """A window of a kept value, a leaf where its gradient is wanted."""
    return tensor.detach().requires_grad_() if value.wants_grad else tensor.detach()


def detached_unless_wanted(value: Value, result: Tensor) -> Tensor:
    """A result whose gradient torch does not follow goes without."""
    return result if value.wants_grad or not result.requires_grad else result.detach()


def merged(unit: TracedOp, parts: Tensor) -> Tensor:
    return parts.sum(0) if unit.merge is None else unit.merge(parts)
