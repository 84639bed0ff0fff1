"""Executes additive rules: with the tile's own pixels while the halo travels, then with each received piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.halo import Move
from widefield.geometry.box import Box, is_empty, meet, within
from widefield.geometry.layout import Grid, Layout, layout_of
from widefield.rules import Additive, LocalBoxes, Meta, PartialSum, Tile
from widefield.tiled.executors.windowed import Execute, rest_of_tensors
from widefield.tiled.partial_gradient import partial_of
from widefield.tiled.redistribute import boxes_of, local_of, move_for, num_shards_of, space_group, wanted_by
from widefield.tiled.tensor import wrap, wrap_view


class _Boxes:
    """The boxes that an additive rule works on, and the exchange; computed once.

    over: this rank's tile of `d.over`.  local: what this rank has itself of what it needs of `d.read.tensor`.
    met: the part of `over` that `local` adds to.
    """

    def __init__(self, d: Additive, grid: Grid) -> None:
        over, meta = d.over, d.read.tensor
        writes = boxes_of(over, grid)
        wanted = wanted_by(d.read, writes, over.shape)
        self.over, owned = writes[grid.index], boxes_of(meta, grid)[grid.index]
        self.move = None if meta.layout is None else move_for(meta.layout, wanted)
        self.local = meet(owned, wanted[grid.index])
        self.met = _met(d, self.local, self.over, all_reached=True)
        self.local_index = None if self.local == owned else within(owned, self.local)
        self.met_index = None if self.met == self.over else within(self.over, self.met)
        self.is_idle = self.move is None or self.move.is_idle
        self.has_own = not is_empty(self.local) and not is_empty(self.met)


def build_additive(d: Additive, grid: Grid) -> Execute:
    """The function that executes an Additive description on this rank."""
    over, meta, boxes = d.over, d.read.tensor, _Boxes(d, grid)
    move, met_index, local_index = boxes.move, boxes.met_index, boxes.local_index
    covers = _covers_own_sum(d, boxes)
    base = d.prepare(LocalBoxes((boxes.local,), boxes.met, with_own_sum=covers)) if boxes.has_own else None
    own_sum = None if d.own_sum is None or (covers and base is not None) else _own_sum(d)
    terms = _terms(d, move, boxes.over)
    finish = _sums_wrapper(d.outs, over, num_shards_of(over), grid)
    rest, group = rest_of_tensors([meta.number, over.number]), space_group(grid)

    def execute(tensors: Sequence[Tensor]) -> Any:
        read, mine, others = tensors[meta.number], local_of(tensors[over.number]), rest(tensors)
        tile = local_of(read)
        pieces = () if boxes.is_idle else _saved_halo(read, move)
        pending = halo.start([move], [tile], group) if pieces is None and move is not None else None
        outs: list[Any] = [None] * len(d.outs)
        local = tile if base is None or local_index is None else tile[local_index]
        if base is not None and met_index is None:
            outs = list(base(local, mine, *others))
        elif base is not None and met_index is not None:
            _add(outs, d.outs, base(local, mine[met_index], *others), met_index, mine)
        if own_sum is not None:
            number, total = own_sum(tensors)
            outs[number] = total
        if pending is not None:
            (pieces,) = pending.wait()
        for (_, piece), (where, run) in zip(pieces, terms, strict=False):
            if run is not None:
                _add(outs, d.outs, run(piece, mine[where], *others), where, mine)
        return finish(outs, tensors)

    return execute


def _saved_halo(read: Tensor, move: Move | None) -> Any:
    """The pieces that the forward operation received, if it saved them; else None."""
    saved = (getattr(read, "saved_halos", None) or {}).get(id(move))
    return saved[1] if saved is not None and saved[0] is move else None


def _covers_own_sum(d: Additive, boxes: _Boxes) -> bool:
    """Whether `own_sum` is over the same pixels as the tile's own part, so that one local operation gives both."""
    if d.own_sum is None:
        return False
    summed = d.own_sum[0]
    if summed.is_cut and d.over.is_cut and summed.layout.axes != d.over.layout.axes:  # type: ignore[union-attr]
        averaged = all(out.is_partial_gradient for out in d.outs if isinstance(out, PartialSum))
        assert averaged, "a sum over other axes than the tile's can only be a partial gradient"
    whole = boxes.local_index is None or summed is not d.read.tensor
    return num_shards_of(summed) == num_shards_of(d.over) and whole and boxes.met_index is None


def _own_sum(d: Additive) -> Callable[[Sequence[Tensor]], tuple[int, Tensor]]:
    """The sum over one tensor's own tile, scaled so that over all ranks it counts each pixel as often as the other sums do."""
    assert d.own_sum is not None
    summed, (number, run) = d.own_sum
    share = num_shards_of(summed) / num_shards_of(d.over)
    return lambda tensors: (number, run(local_of(tensors[summed.number])) * share)


def _terms(d: Additive, move: Move | None, over: Box) -> list[tuple[tuple[slice, ...], Any]]:
    """For each piece that is received: the part of the tile `over` that it adds to, as an index, and the local operation."""
    terms = []
    for _, box in move.route.receives if move is not None else ():
        where = _met(d, box, over)
        terms.append(((), None) if is_empty(where) else (within(over, where), d.prepare(LocalBoxes((box,), where))))
    return terms


def _met(d: Additive, box: Box, over: Box, *, all_reached: bool = False) -> Box:
    """The part of the tile `over` that a piece adds to; with `all_reached` all of the tile on the dims of the reach."""
    met = []
    for dim, interval in enumerate(over):
        reach = d.read.reach.get(dim)
        if reach is not None:
            met.append(interval if all_reached else reach.output_reading(box[dim]) & interval)  # type: ignore[attr-defined]
        else:
            same = d.read.tensor.shape[dim] == d.over.shape[dim]
            met.append(box[dim] & interval if same else interval)
    return tuple(met)


def _add(outs: list[Any], kinds: Sequence[Any], term: Sequence[Any], where: tuple[slice, ...], mine: Tensor) -> None:
    """Add a piece's terms: to the box `where` of a Tile, to all of a PartialSum."""
    for number, value in enumerate(term):
        if value is None:
            continue
        if isinstance(kinds[number], Tile):
            if outs[number] is None:
                outs[number] = torch.zeros_like(mine)
            outs[number][where] += value
        else:
            outs[number] = value if outs[number] is None else outs[number] + value


def _sums_wrapper(outs: Sequence[Tile | PartialSum | None], over: Meta, num_shards: int, grid: Grid) -> Callable:
    """A function from this rank's parts to the operation's outputs."""
    layout = over.layout

    def finish(parts: Sequence[Any], tensors: Sequence[Tensor]) -> tuple:
        done: list[Any] = []
        for out, value in zip(outs, parts, strict=True):
            if out is None:
                done.append(None)
            elif isinstance(out, PartialSum):
                done.append(finish_total(value, out, num_shards, layout, grid, tensors))
            elif layout is None:
                raise AssertionError("an additive rule's tile must be that of a tiled tensor")
            else:
                value = tensors[over.number].local.new_zeros(layout.tile_shape) if value is None else value  # type: ignore
                done.append(wrap(value, layout))
        return tuple(done) if len(done) > 1 else done[0]

    return finish


def finish_total(
    value: Tensor | None, out: PartialSum, num_shards: int, layout: Layout | None, grid: Grid, tensors: Sequence[Tensor]
) -> Tensor:
    """The output for a sum of which this rank has the part `value`: a partial gradient, or the sum over ranks."""
    if value is None:
        value = torch.zeros(out.shape, dtype=out.dtype or tensors[0].dtype, device=tensors[0].device)
    if num_shards == 1:
        return value if out.is_partial_gradient else _uncut(value, grid)
    if out.is_partial_gradient:
        return partial_of(value.mul(num_shards), grid)
    assert layout is not None
    return _uncut(halo.add_sums(value, grid.group_name(layout.axes)), grid)


def _uncut(value: Tensor, grid: Grid) -> Tensor:
    return value if value.ndim == 0 else wrap_view(value, layout_of(tuple(value.shape), (None,) * value.ndim, grid))
