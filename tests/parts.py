"""Runs a reduction's rule tile after tile in one process, as a stream does: each tile a turn of its own, on plain tensors.

`local` makes each turn's part, `merge` the total, `update_buffers` runs once, `finish` in every turn; autograd sees all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from widefield.geometry.layout import Cut, Grid, Layout, layout_of
from widefield.kernels import moments
from widefield.rules import RULES, Meta, Reduced, Tile
from widefield.tiled.redistribute import first_cut, to_layout

Bounds = Sequence[tuple[int, ...]]
"""Of the tiles along the last dim but one, or along the last two."""


class Given(NamedTuple):
    """A random tensor argument: made(randn(shape)), cut along rows and columns or plain."""

    shape: tuple[int, ...]
    is_cut: bool = False
    has_grad: bool = False
    made: Callable[[Tensor], Tensor] = Tensor.clone


class Call(NamedTuple):
    name: str
    op: Any
    args: tuple
    kwargs: dict


def call(name: str, op: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(name, op, args, kwargs)


@dataclass
class Turn:
    """What one turn works on: the description it gets, and all tensor arguments, those that are read as tiles."""

    description: Reduced
    tensors: list[Tensor]
    layout: Layout

    @property
    def part(self) -> Tensor:
        return self.description.local(*(self.tensors[meta.number] for meta in self.description.reads))

    def finish(self, total: Tensor) -> tuple:
        found = total if self.description.finish is None else self.description.finish(total, *self.tensors)
        return found if isinstance(found, tuple) else (found,)


def turns_of(call: Call, tensors: Sequence[Tensor], bounds: Bounds) -> list[Turn]:
    size = math.prod(len(of_axis) - 1 for of_axis in bounds)
    return [turn_of(call, tensors, bounds, index) for index in range(size)]


def layout_for(given: Given, bounds: Bounds, index: int) -> Layout | None:
    if not given.is_cut:
        return None
    grid = Grid(tuple(len(of_axis) - 1 for of_axis in bounds), index)
    cuts: list[Cut | None] = [None] * len(given.shape)
    for axis, of_axis in enumerate(bounds):
        cuts[len(given.shape) - 2 + axis] = Cut((axis,), of_axis)
    return layout_of(given.shape, tuple(cuts), grid)


def turn_of(call: Call, tensors: Sequence[Tensor], bounds: Bounds, index: int) -> Turn:
    numbers = iter(range(len(tensors)))

    def described(value: Any) -> Any:
        if not isinstance(value, Given):
            return value
        number = next(numbers)
        return Meta(value.shape, tensors[number].dtype, layout_for(value, bounds, index), number)

    args, kwargs = (tree_map(described, part, is_leaf=is_given) for part in (call.args, call.kwargs))
    description = RULES[call.op](*args, **kwargs)
    assert isinstance(description, Reduced), f"{call.name} gave {description!r}"
    at = description.layouts or [first_cut(description.reads).layout] * len(description.reads)
    tiles = list(tensors)
    for meta, layout in zip(description.reads, at, strict=True):
        tiles[meta.number] = tiles[meta.number] if layout is None else to_layout(tensors[meta.number], layout)
    return Turn(description, tiles, at[0])  # type: ignore[arg-type]


def is_given(value: Any) -> bool:
    return isinstance(value, Given)


def tensors_for(call: Call, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Every Given of a call, the same for the same seed; images of `dtype`, plain tensors of that of its statistics."""
    draw, found = torch.Generator().manual_seed(seed), []
    for given in filter(is_given, tree_leaves((call.args, call.kwargs), is_leaf=is_given)):
        made = given.made(torch.randn(given.shape, generator=draw, dtype=torch.float64))
        if made.dtype == torch.float64:
            made = made.to(dtype if given.is_cut else moments.statistics_dtype(dtype))
        found.append(made.requires_grad_(given.has_grad))
    return found


def on_the_whole(call: Call, tensors: Sequence[Tensor]) -> tuple:
    left = iter(tensors)
    args, kwargs = (
        tree_map(lambda value: next(left) if is_given(value) else value, part, is_leaf=is_given)
        for part in (call.args, call.kwargs)
    )
    found = call.op(*args, **kwargs)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def tile_after_tile(call: Call, tensors: Sequence[Tensor], bounds: Bounds, *, ends: Bounds | None = None) -> tuple:
    """The operation's outputs; `ends`: other bounds for the tiles that `finish` is given, where there is one total."""
    turns = turns_of(call, tensors, bounds)
    totals = totals_of(turns)
    if turns[0].description.update_buffers is not None:
        assert len(set(map(id, totals))) == 1, f"{call.name} is settled once, and has several totals"
        turns[0].description.update_buffers(totals[0], *turns[0].tensors)
    if ends is not None:
        assert len(set(map(id, totals))) == 1, f"{call.name} has several totals"
        turns = turns_of(call, tensors, ends)
        totals = totals[:1] * len(turns)
    results = [turn.finish(total) for turn, total in zip(turns, totals, strict=True)]
    return tuple(joined(turns, [result[n] for result in results], n) for n in range(len(results[0])))


def totals_of(turns: Sequence[Turn]) -> list[Tensor]:
    """For each turn the total over those that differ from it along cuts of the dims that are summed."""
    layout, merge = turns[0].layout, turns[0].description.merge
    axes = {axis for dim in turns[0].description.dims if (cut := layout.cuts[dim]) for axis in cut.axes}
    groups: dict[tuple, list[Turn]] = {}
    for n, turn in enumerate(turns):
        key = tuple(place for axis, place in enumerate(layout.grid.coordinate(n)) if axis not in axes)
        groups.setdefault(key, []).append(turn)
    total_of = {}
    for members in groups.values():
        parts = torch.stack([turn.part for turn in members])
        total = parts.sum(0) if merge is None else merge(parts)
        total_of.update({id(turn): total for turn in members})
    return [total_of[id(turn)] for turn in turns]


def joined(turns: Sequence[Turn], values: Sequence[Tensor], number: int) -> Tensor:
    """An output of the whole, from those of every turn."""
    out = turns[0].description.outs[number]
    if not isinstance(out, Tile):
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=0, atol=0, equal_nan=True)
        return values[0]
    whole = torch.zeros(out.shape, dtype=values[0].dtype)
    for turn, value in zip(turns, values, strict=True):
        layout = layout_of(out.shape, turn.layout.cuts if out.cuts is None else out.cuts, turn.layout.grid)
        assert value.shape == layout.tile_shape
        whole[tuple(slice(i.start, i.stop) for i in layout.box)] = value
    return whole


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of the sum of all outputs that have a gradient, each pixel with a random weight: eighths, which no dtype rounds."""
    draw = torch.Generator().manual_seed(1)
    weights = [(torch.randn(out.shape, generator=draw) * 8).round() / 8 for out in outputs]
    pulled = {out: pull.to(out.dtype) for out, pull in zip(outputs, weights, strict=True) if out.requires_grad}
    wanted = [value for value in inputs if value.requires_grad]
    if not pulled:
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(list(pulled), wanted, list(pulled.values()), allow_unused=True)
    return [torch.zeros_like(x) if value is None else value for x, value in zip(wanted, found, strict=True)]
