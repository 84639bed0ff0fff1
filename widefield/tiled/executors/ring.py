"""Executes the rules whose tensors each have a layout of their own: sharded products and rings.

In a ring of n ranks every rank sends its current tile to the next rank while it computes with it.  After n steps it has seen
all tiles, and had at most two at a time.  What it adds to the sum of another rank's tile goes straight to that rank.

Source: Ring Attention, Liu, Zaharia and Abbeel 2023, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.halo import Move
from widefield.geometry.box import Route, full_box, is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Grid, Layout
from widefield.private_torch.autograd import current_graph_task_id
from widefield.rules import Ring, ShardedProduct
from widefield.tiled.partial_gradient import partial_of
from widefield.tiled.redistribute import local_of, space_group, tile_by
from widefield.tiled.tensor import wrap_view

Execute = Callable[[Sequence[Tensor]], Any]


def build_sharded_product(d: ShardedProduct, grid: Grid) -> Execute:
    """The function that executes a ShardedProduct description on this rank."""
    layouts = [(meta.number, layout) for meta, layout in zip(d.reads, d.layouts, strict=True)]
    group = grid.group_name(d.partial_axes) if grid.num_shards(d.partial_axes) > 1 else ""
    spread = grid.num_shards(tuple(sorted({*d.partial_axes, *d.out.axes})))

    def execute(tensors: Sequence[Tensor]) -> Any:
        part = d.run(*_tiles_of(tensors, layouts))
        if spread > 1 and (d.is_partial_gradient or (group and not d.out.is_cut and _in_first_backward())):
            return partial_of(_part_of_mean(part, d.out, spread), grid)
        if group:
            part = halo.add_sums(part, group)
        return part if part.ndim == 0 else wrap_view(part, d.out)

    return execute


def _in_first_backward() -> bool:
    """Whether a backward runs that is not itself differentiated: then a partial gradient may stand for the sum."""
    return current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _part_of_mean(part: Tensor, layout: Layout, spread: int) -> Tensor:
    """A rank's contribution, of the whole's shape, such that the mean over ranks is the sum."""
    part = part * spread
    if not layout.is_cut:
        return part
    whole = part.new_zeros(layout.shape)
    whole[tuple(slice(i.start, i.stop) for i in layout.box)] = part
    return whole


def _tiles_of(tensors: Sequence[Tensor], layouts: Sequence[tuple[int, Layout]]) -> list[Tensor]:
    """All tensor arguments as plain tensors; those with a layout as this rank's tiles by it."""
    tiles = [local_of(tensor) for tensor in tensors]
    for number, layout in layouts:
        tiles[number] = tile_by(tensors[number], layout)
    return tiles


# ---------------------------------------------------------------------------------------------- rings


def build_ring(d: Ring, grid: Grid) -> Execute:
    """The function that executes a Ring description on this rank."""
    layouts = [(meta.number, layout) for meta, layout in zip(d.reads, d.layouts, strict=True)]
    rotating = [dict(layouts)[number] for number in d.rotating]
    ring = _ring(grid, d.axes)
    me, count = ring.index(grid.index), len(ring)
    to_next = [_moves_to_next(rotating, ring, me, step) for step in range(count - 1)]
    to_owner = [_moves_to_owner(rotating, ring, me, step) for step in range(count)]
    at = [rotating[0].boxes[ring[(me - step) % count]][d.dim] for step in range(count)]
    group, sum_group = space_group(grid), grid.group_name(d.sum_axes) if grid.num_shards(d.sum_axes) > 1 else ""

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = _tiles_of(tensors, layouts)
        rotated = [tiles[number] for number in d.rotating]
        state: Any = None
        sums: tuple[Tensor, ...] = ()
        sent: halo.Pending | None = None
        for step in range(count):
            coming = halo.start(to_next[step], rotated, group) if step < count - 1 else None
            state, parts = d.step(state, tiles, rotated, at[step])
            sums = _with_received(sums, sent)
            if step == 0:
                sums = tuple(parts)
            else:
                sent = halo.start(to_owner[step], [part.contiguous() for part in parts], group) if parts else None
            rotated = _arrived(coming, rotated, rotating, ring[(me - step - 1) % count]) if coming is not None else rotated
        sums = _with_received(sums, sent)
        if sum_group:
            sums = tuple(halo.add_sums(part, sum_group) for part in sums)
        return _wrapped(d.finish(state, tiles, sums), d.outs)

    return execute


def _ring(grid: Grid, axes: tuple[int, ...]) -> list[int]:
    """The ranks that differ from this one in `axes` alone, ascending; each sends to the one after it."""
    here = grid.coordinate(grid.index)
    others = [axis for axis in range(len(grid.sizes)) if axis not in axes]
    return [rank for rank in range(grid.size) if all(grid.coordinate(rank)[axis] == here[axis] for axis in others)]


def _moves_to_next(rotating: Sequence[Layout], ring: Sequence[int], me: int, step: int) -> list[Move]:
    """Send this step's tiles to the next rank and receive the previous rank's."""
    count = len(ring)
    mine, theirs = ring[(me - step) % count], ring[(me - step - 1) % count]
    after, before = ring[(me + 1) % count], ring[(me - 1) % count]
    return [_pass(layout, mine, after, theirs, before) for layout in rotating]


def _moves_to_owner(rotating: Sequence[Layout], ring: Sequence[int], me: int, step: int) -> list[Move]:
    """Send the parts computed in this step to the rank that owns the tiles; receive those computed for this rank's tiles."""
    count = len(ring)
    owner, maker = ring[(me - step) % count], ring[(me + step) % count]
    return [_pass(layout, owner, owner, ring[me], maker) for layout in rotating]


def _pass(layout: Layout, going: int, to: int, coming: int, source: int) -> Move:
    """Send rank `going`'s tile to rank `to` and receive rank `coming`'s from rank `source`; empty tiles are not sent."""
    out, come = layout.boxes[going], layout.boxes[coming]
    sends = () if is_empty(out) else ((to, out),)
    receives = () if is_empty(come) else ((source, come),)
    whole = full_box(layout.shape)
    return Move(out, whole, Route(sends, receives, tuple(Interval(0, 0) for _ in whole)))


def _arrived(coming: halo.Pending, rotated: Sequence[Tensor], rotating: Sequence[Layout], rank: int) -> list[Tensor]:
    """The received tiles, which are rank `rank`'s; empty ones were not sent."""
    got = coming.wait()
    return [
        pieces[0][1] if pieces else tile.new_empty(size_of(layout.boxes[rank]))
        for pieces, tile, layout in zip(got, rotated, rotating, strict=True)
    ]


def _with_received(sums: tuple[Tensor, ...], sent: halo.Pending | None) -> tuple[Tensor, ...]:
    """The sums of this rank's tiles, to which another rank's parts are added in place."""
    if sent is None:
        return sums
    return tuple(total.add_(pieces[0][1]) if pieces else total for total, pieces in zip(sums, sent.wait(), strict=True))


def _wrapped(values: Sequence[Any], outs: Sequence[Layout | None]) -> tuple:
    pairs = zip(values, outs, strict=True)
    return tuple(wrap_view(v, to) if to is not None and isinstance(v, Tensor) and v.ndim else v for v, to in pairs)
