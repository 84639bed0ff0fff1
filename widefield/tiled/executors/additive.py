"""Carries out additive rules: the tile's own pixels first, while the halo travels, then each piece as it came."""

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
    """What an additive rule needs of where things are: found once."""

    def __init__(self, d: Additive, grid: Grid) -> None:
        over, meta = d.over, d.read.tensor
        writes = boxes_of(over, grid)
        wanted = wanted_by(d.read, writes, over.shape)
        self.writeback, held = writes[grid.index], boxes_of(meta, grid)[grid.index]
        self.move = None if meta.layout is None else move_for(meta.layout, wanted)
        self.local = meet(held, wanted[grid.index])
        self.at_home = _met(d, self.local, self.writeback, all_reached=True)
        self.own_part = None if self.local == held else within(held, self.local)
        self.home_part = None if self.at_home == self.writeback else within(self.writeback, self.at_home)
        self.is_idle = self.move is None or self.move.is_idle
        self.has_own = not is_empty(self.local) and not is_empty(self.at_home)


def build_additive(d: Additive, grid: Grid) -> Execute:
    """The function that carries out an additive rule on this rank."""
    over, meta, boxes = d.over, d.read.tensor, _Boxes(d, grid)
    move, home_part, own_part = boxes.move, boxes.home_part, boxes.own_part
    covers = _covers(d, boxes)
    base = d.prepare(LocalBoxes((boxes.local,), boxes.at_home, alone=covers)) if boxes.has_own else None
    alone = None if d.alone is None or (covers and base is not None) else _alone(d)
    terms = _terms(d, move, boxes.writeback)
    finish = _sums_wrapper(d.outs, over, num_shards_of(over), grid)
    rest, group = rest_of_tensors([meta.number, over.number]), space_group(grid)

    def execute(tensors: Sequence[Tensor]) -> Any:
        read, mine, others = tensors[meta.number], local_of(tensors[over.number]), rest(tensors)
        tile = local_of(read)
        pieces = () if boxes.is_idle else _kept(read, move)
        pending = halo.start([move], [tile], group) if pieces is None and move is not None else None
        outs: list[Any] = [None] * len(d.outs)
        if base is not None and home_part is None:
            outs = list(base(tile if own_part is None else tile[own_part], mine, *others))
        elif base is not None and home_part is not None:
            _add(outs, d.outs, base(tile if own_part is None else tile[own_part], mine[home_part], *others), home_part, mine)
        if alone is not None:
            number, total = alone(tensors)
            outs[number] = total
        if pending is not None:
            (pieces,) = pending.wait()
        for (_, piece), (where, run) in zip(pieces, terms, strict=False):
            if run is not None:
                _add(outs, d.outs, run(piece, mine[where], *others), where, mine)
        return finish(outs, tensors)

    return execute


def _kept(read: Tensor, move: Move | None) -> Any:
    """The pieces that the forward operation fetched, if it did and kept them."""
    kept = (getattr(read, "kept", None) or {}).get(id(move))
    return kept[1] if kept is not None and kept[0] is move else None


def _covers(d: Additive, boxes: _Boxes) -> bool:
    """Whether the tile's own part is all that the sum `alone` is over, so that one local operation gives both."""
    if d.alone is None:
        return False
    summed = d.alone[0]
    if summed.is_cut and d.over.is_cut and summed.layout.axes != d.over.layout.axes:  # type: ignore[union-attr]
        averaged = all(out.is_partial_gradient for out in d.outs if isinstance(out, PartialSum))
        assert averaged, "a sum over other axes than the tile's adds up in the mean over all ranks alone"
    whole = boxes.own_part is None or summed is not d.read.tensor
    return num_shards_of(summed) == num_shards_of(d.over) and whole and boxes.home_part is None


def _alone(d: Additive) -> Callable[[Sequence[Tensor]], tuple[int, Tensor]]:
    """The sum over one tensor's tile by itself, weighed so that its total over ranks counts each pixel once."""
    assert d.alone is not None
    summed, (number, run) = d.alone
    share = num_shards_of(summed) / num_shards_of(d.over)
    return lambda tensors: (number, run(local_of(tensors[summed.number])) * share)


def _terms(d: Additive, move: Move | None, home: Box) -> list[tuple[tuple[slice, ...], Any]]:
    """For each piece that comes: the part of the tile at home that it meets, and the local operation."""
    terms = []
    for _, box in move.route.receives if move is not None else ():
        where = _met(d, box, home)
        terms.append(((), None) if is_empty(where) else (within(home, where), d.prepare(LocalBoxes((box,), where))))
    return terms


def _met(d: Additive, box: Box, home: Box, *, all_reached: bool = False) -> Box:
    """The part of the tile at home that a piece meets; with `all_reached` all of it on the dims that windows read."""
    met = []
    for dim, interval in enumerate(home):
        reach = d.read.reach.get(dim)
        if reach is not None:
            met.append(interval if all_reached else reach.output_reading(box[dim]) & interval)  # type: ignore[attr-defined]
        else:
            same = d.read.tensor.shape[dim] == d.over.shape[dim]
            met.append(box[dim] & interval if same else interval)
    return tuple(met)


def _add(outs: list[Any], kinds: Sequence[Any], term: Sequence[Any], where: tuple[slice, ...], mine: Tensor) -> None:
    """Add a piece's part: to the box `where` of a tile, to the whole of a sum."""
    for number, value in enumerate(term):
        if value is None:
            continue
        if isinstance(kinds[number], Tile):
            if outs[number] is None:
                outs[number] = torch.zeros_like(mine)
            outs[number][where] += value
        else:
            outs[number] = value if outs[number] is None else outs[number] + value


def _sums_wrapper(outs: Sequence[Tile | PartialSum | None], over: Meta, ways: int, grid: Grid) -> Callable:
    """Turn this rank's parts into the operation's outputs."""
    layout = over.layout

    def finish(parts: Sequence[Any], tensors: Sequence[Tensor]) -> tuple:
        done: list[Any] = []
        for out, value in zip(outs, parts, strict=True):
            if out is None:
                done.append(None)
            elif isinstance(out, PartialSum):
                done.append(finish_total(value, out, ways, layout, grid, tensors))
            elif layout is None:
                raise AssertionError("an additive rule's tile must be that of a tiled tensor")
            else:
                value = tensors[over.number].local.new_zeros(layout.tile_shape) if value is None else value  # type: ignore
                done.append(wrap(value, layout))
        return tuple(done) if len(done) > 1 else done[0]

    return finish


def finish_total(
    value: Tensor | None, out: PartialSum, ways: int, layout: Layout | None, grid: Grid, tensors: Sequence[Tensor]
) -> Tensor:
    """A sum of which this rank has a part: a partial gradient, or added up now."""
    if value is None:
        value = torch.zeros(out.shape, dtype=out.dtype or tensors[0].dtype, device=tensors[0].device)
    if ways == 1:
        return value if out.is_partial_gradient else _uncut(value, grid)
    if out.is_partial_gradient:
        return partial_of(value.mul(ways), grid)
    assert layout is not None
    return _uncut(halo.add_sums(value, grid.group_name(layout.axes)), grid)


def _uncut(value: Tensor, grid: Grid) -> Tensor:
    return value if value.ndim == 0 else wrap_view(value, layout_of(tuple(value.shape), (None,) * value.ndim, grid))
