"""Carries out the rules whose tensors are laid out each in its own way: products, and attention, whose tiles go round.

In a ring of n ranks every rank sends the tile that it holds to the next while it works on it, so that after n turns each has
seen all of them and never held more than two; what it adds to another's tile goes straight home (Ring Attention: Liu, Zaharia
and Abbeel 2023, arXiv:2310.01889).
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
from widefield.tiled.redistribute import redistribute, space_group
from widefield.tiled.tensor import TiledTensor, wrap_view

Execute = Callable[[Sequence[Tensor]], Any]


def brought(tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's tile of a tensor of the layout's shape, wherever its pixels are now."""
    if type(tensor) is TiledTensor:
        return redistribute(tensor, layout)
    return tensor[tuple(slice(i.start, i.stop) for i in layout.box)] if layout.is_cut else tensor


def build_sharded_product(d: ShardedProduct, grid: Grid) -> Execute:
    """The function that carries out a ShardedProduct description on this rank."""
    places = [(meta.number, layout) for meta, layout in zip(d.reads, d.layouts, strict=True)]
    group = grid.group_name(d.over) if grid.num_shards(d.over) > 1 else ""
    spread = grid.num_shards(tuple(sorted({*d.over, *d.out.axes})))

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = _as_tiles(tensors)
        for number, layout in places:
            tiles[number] = brought(tensors[number], layout)
        part = d.run(*tiles)
        if spread > 1 and (d.is_partial_gradient or (group and not d.out.is_cut and _in_first_backward())):
            return partial_of(_part_of_mean(part, d.out, spread), grid)
        if group:
            part = halo.add_sums(part, group)
        return part if part.ndim == 0 else wrap_view(part, d.out)

    return execute


def _in_first_backward() -> bool:
    """Whether a gradient is computed that is not differentiated again: then who wants its value may wait for it."""
    return current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _part_of_mean(part: Tensor, layout: Layout, spread: int) -> Tensor:
    """What a rank gives so that the mean over ranks is the whole sum."""
    part = part * spread
    if not layout.is_cut:
        return part
    whole = part.new_zeros(layout.shape)
    whole[tuple(slice(i.start, i.stop) for i in layout.box)] = part
    return whole


def _as_tiles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.local if type(tensor) is TiledTensor else tensor for tensor in tensors]


# ---------------------------------------------------------------------------------------------- tiles that go round


def build_ring(d: Ring, grid: Grid) -> Execute:
    """The function that carries out a Ring description on this rank."""
    places = [(meta.number, layout) for meta, layout in zip(d.reads, d.layouts, strict=True)]
    layouts = {number: layout for number, layout in places if number in d.travel}
    ring = _ring(grid, d.axes)
    me, count = ring.index(grid.index), len(ring)
    travels = [layouts[number] for number in d.travel]
    onward = [_onward(travels, ring, me, turn) for turn in range(count - 1)]
    homeward = [_homeward(travels, ring, me, turn) for turn in range(count)]
    at = [travels[0].boxes[ring[(me - turn) % count]][d.dim] for turn in range(count)]
    group, together = space_group(grid), grid.group_name(d.together) if grid.num_shards(d.together) > 1 else ""

    def execute(tensors: Sequence[Tensor]) -> Any:
        stay = _as_tiles(tensors)
        for number, layout in places:
            stay[number] = brought(tensors[number], layout)
        held = [stay[number] for number in d.travel]
        state: Any = None
        homes: tuple[Tensor, ...] = ()
        sent: halo.Pending | None = None
        for turn in range(count):
            coming = halo.start(onward[turn], held, group) if turn < count - 1 else None
            state, parts = d.turn(state, stay, held, at[turn])
            homes = _received(homes, sent)
            if turn == 0:
                homes = tuple(parts)
            else:
                sent = halo.start(homeward[turn], [part.contiguous() for part in parts], group) if parts else None
            held = _arrived(coming, held, travels, ring[(me - turn - 1) % count]) if coming is not None else held
        homes = _received(homes, sent)
        if together:
            homes = tuple(halo.add_sums(part, together) for part in homes)
        return _wrapped(d.finish(state, stay, homes), d.outs)

    return execute


def _ring(grid: Grid, axes: tuple[int, ...]) -> list[int]:
    """The ranks that differ from this one in `axes` alone, in their order; each sends to the one after it."""
    here = grid.coordinate(grid.index)
    alike = [axis for axis in range(len(grid.sizes)) if axis not in axes]
    return [rank for rank in range(grid.size) if all(grid.coordinate(rank)[axis] == here[axis] for axis in alike)]


def _onward(travels: Sequence[Layout], ring: Sequence[int], me: int, turn: int) -> list[Move]:
    """Pass on the tile held in this turn and take the next."""
    count = len(ring)
    mine, theirs = ring[(me - turn) % count], ring[(me - turn - 1) % count]
    after, before = ring[(me + 1) % count], ring[(me - 1) % count]
    return [_pass(layout, mine, after, theirs, before) for layout in travels]


def _homeward(travels: Sequence[Layout], ring: Sequence[int], me: int, turn: int) -> list[Move]:
    """Send the part made for the tile held in this turn to its home; take the one that was made for mine."""
    count = len(ring)
    home, maker = ring[(me - turn) % count], ring[(me + turn) % count]
    return [_pass(layout, home, home, ring[me], maker) for layout in travels]


def _pass(layout: Layout, going: int, to: int, coming: int, source: int) -> Move:
    """Send the tile of rank `going` to rank `to` and take that of rank `coming` from `source`; empty tiles are not sent."""
    out, come = layout.boxes[going], layout.boxes[coming]
    sends = () if is_empty(out) else ((to, out),)
    receives = () if is_empty(come) else ((source, come),)
    whole = full_box(layout.shape)
    return Move(out, whole, Route(sends, receives, tuple(Interval(0, 0) for _ in whole)))


def _arrived(coming: halo.Pending, held: Sequence[Tensor], travels: Sequence[Layout], rank: int) -> list[Tensor]:
    """The tiles of the rank before; an empty one is not sent."""
    got = coming.wait()
    return [
        pieces[0][1] if pieces else tile.new_empty(size_of(layout.boxes[rank]))
        for pieces, tile, layout in zip(got, held, travels, strict=True)
    ]


def _received(homes: tuple[Tensor, ...], sent: halo.Pending | None) -> tuple[Tensor, ...]:
    """Add what another rank has made for the tiles that live here."""
    if sent is None:
        return homes
    return tuple(home.add_(pieces[0][1]) if pieces else home for home, pieces in zip(homes, sent.wait(), strict=True))


def _wrapped(values: Sequence[Any], outs: Sequence[Layout | None]) -> tuple:
    pairs = zip(values, outs, strict=True)
    return tuple(wrap_view(v, to) if to is not None and isinstance(v, Tensor) and v.ndim else v for v, to in pairs)
