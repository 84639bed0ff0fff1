"""Tiles in time within tiles in space: several ranks stream one image.

The virtual grid has a place for every tile in time of every rank.  A rank runs its own tiles.  Before a segment it fetches the
halo of its tile from other ranks, and after the segment's backward it sends the gradients of these pixels back.  The parts of
reductions are gathered, so that every rank has every total.  Gradients of small values are summed over ranks; those of weights
stay partial, for DDP or FSDP to average (see `tiled/tensor.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from widefield.capture.decompositions import BATCH_NORM_OVER
from widefield.capture.ir import Value
from widefield.comm import halo
from widefield.comm.halo import Move
from widefield.geometry.box import Box, holds, is_empty, meet, route
from widefield.geometry.interval import Interval, natural_cut
from widefield.geometry.layout import Cut, Cuts, Grid, Layout, layout_of
from widefield.private_torch.process_groups import resolve_process_group
from widefield.streaming.schedule import StreamedTile
from widefield.streaming.tile_ops import union
from widefield.streaming.tile_planner import TracedOp
from widefield.tiled.redistribute import space_group
from widefield.tiled.rng import compare_generators

EMPTY = Interval(0, 0)


@dataclass(frozen=True)
class SpatialStream:
    """grid: the ranks of the image.  tiles: the number of tiles in time of each rank, per axis."""

    grid: Grid
    tiles: tuple[int, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the virtual grid."""
        spread = self.grid.sizes or (1,) * len(self.tiles)
        return tuple(ranks * tiles for ranks, tiles in zip(spread, self.tiles, strict=True))

    @property
    def is_single_rank(self) -> bool:
        return self.grid.size == 1

    @cached_property
    def virtual(self) -> Grid:
        return Grid(self.sizes)

    def rank_of(self, tile: int) -> int:
        """The rank that runs a tile."""
        rank = 0
        for at, size, tiles in zip(self.virtual.coordinate(tile), self.sizes, self.tiles, strict=True):
            rank = rank * (size // tiles) + at // tiles
        return rank

    def local(self, tiles: Sequence[StreamedTile]) -> list[StreamedTile]:
        """The tiles of this rank."""
        return list(tiles) if self.is_single_rank else [tile for tile in tiles if self.rank_of(tile.number) == self.grid.index]

    def check_generators(self, unit: TracedOp) -> None:
        """Before a draw, which every rank makes for the whole image: raise unless the ranks' generators have the same state."""
        out = unit.outs[0]
        if unit.node.draws and not self.is_single_rank and out is not None:
            group, generator = resolve_process_group(space_group(self.grid)), unit.node.generator
            compare_generators(group, out.device, generator, drawn=out.shape)

    # ------------------------------------------------------------------------------------------ layouts

    def cut(self, shape: tuple[int, ...], cuts: Cuts | None) -> Layout:
        """The layout of an input on the virtual grid.  cuts: those of its tiles in space, if any."""
        first = len(shape) - len(self.tiles)
        made: list[Cut | None] = [None] * len(shape)
        for axis, count in enumerate(self.tiles):
            dim = first + axis
            in_space = None if cuts is None else cuts[dim]
            bounds = (0, shape[dim]) if in_space is None else in_space.bounds
            if in_space is None and self.sizes[axis] != count:
                bounds = natural_cut(shape[dim], self.sizes[axis] // count)
            inner = [
                start + at
                for start, stop in zip(bounds, bounds[1:], strict=False)
                for at in natural_cut(stop - start, count)[:-1]
            ]
            made[dim] = Cut((axis,), (*inner, shape[dim]))
        return layout_of(shape, tuple(made), self.virtual)

    def in_space(self, layout: Layout) -> Layout:
        """The layout of a value over the ranks, from its layout on the virtual grid."""
        cuts = [None if cut is None else Cut(cut.axes, cut.bounds[:: self.tiles[cut.axes[0]]]) for cut in layout.cuts]
        return layout_of(layout.shape, tuple(cuts), self.grid)

    def box_of(self, layout: Layout, rank: int) -> Box:
        """The pixels that a rank's own tiles make; none if another rank makes the same pixels."""
        at = self.grid.coordinate(rank)
        if any(at[axis] for axis in range(len(at)) if axis not in layout.axes):
            return (EMPTY,) * len(layout.shape)
        return self.in_space(layout).boxes[rank]

    def own_box(self, layout: Layout) -> Box:
        if self.is_single_rank:
            return tuple(Interval(0, extent) for extent in layout.shape)
        return self.box_of(layout, self.grid.index)

    # ------------------------------------------------------------------------------------------ pixels

    def wanted(self, value: Value, tiles: Sequence[StreamedTile]) -> list[Box]:
        """For each rank, the box of a value that its tiles read."""
        boxes: list[list[Box]] = [[] for _ in range(self.grid.size)]
        for tile in tiles:
            if value in tile.sources and not is_empty(tile.sources[value]):
                boxes[self.rank_of(tile.number)].append(tile.sources[value])
        return [union(found) if found else (EMPTY,) * value.ndim for found in boxes]

    def fetch(self, pairs: Sequence[tuple[Layout, list[Box], Tensor]]) -> list[Tensor]:
        """For each (layout, boxes wanted by the ranks, this rank's own pixels): the pixels that this rank wants."""
        moves = []
        for layout, wanted, _ in pairs:
            owned = [self.box_of(layout, rank) for rank in range(self.grid.size)]
            moves.append(halo.move_of(self.grid.index, owned, wanted))
        return halo.gather(moves, [tensor for *_, tensor in pairs], space_group(self.grid))

    def whole(self, layout: Layout, own: Tensor) -> Tensor:
        """All pixels of a value on every rank, from each rank's own."""
        everything = tuple(Interval(0, extent) for extent in layout.shape)
        return self.fetch([(layout, [everything] * self.grid.size, own)])[0]

    def is_local(self, layout: Layout, wanted: Sequence[Box]) -> bool:
        """Whether each rank owns all pixels that it wants."""
        return all(holds(self.box_of(layout, rank), box) for rank, box in enumerate(wanted))

    def send_back(self, pairs: Sequence[tuple[Layout, list[Box], Tensor]]) -> list[list[tuple[Box, Tensor]]]:
        """The adjoint of `fetch`: from (layout, boxes wanted by the ranks, this rank's gradient of its box) to the pieces that
        are to be added to the gradient of this rank's own pixels."""
        moves, group = [], space_group(self.grid)
        for layout, wanted, _ in pairs:
            owned = [self.box_of(layout, rank) for rank in range(self.grid.size)]
            mine = wanted[self.grid.index]
            moves.append(Move(mine, owned[self.grid.index], route(self.grid.index, wanted, owned)))
        tensors = [tensor for *_, tensor in pairs]
        pieces = halo.start(moves, tensors, group).wait() if any(not move.is_idle for move in moves) else [[] for _ in moves]
        found = []
        for move, tensor, got in zip(moves, tensors, pieces, strict=True):
            own = meet(move.owned, move.wanted)
            found.append([*got, *([(own, tensor[_within(move.owned, own)])] if not is_empty(own) else [])])
        return found

    # ------------------------------------------------------------------------------------------ sums

    def gather_parts(self, unit: TracedOp, tiles: Sequence[StreamedTile], own: Tensor) -> Tensor:
        """The parts of a reduction from all tiles, in order, from those of this rank; over a group of copies, by rank."""
        over = group_of(unit)
        if over is not None:
            name, _, is_inactive = over
            return halo.gather_sums(torch.zeros_like(own) if is_inactive else own, dist_size(name), name).flatten(0, 1)
        if self.is_single_rank:
            return own
        ranks = [self.rank_of(tile.number) for tile in tiles if any(given is unit for given, _ in tile.parts)]
        counts = {rank: ranks.count(rank) for rank in range(self.grid.size)}
        if len(set(counts.values())) != 1:
            raise NotImplementedError(
                f"{unit.node.op} sums along only some of the dims that are cut over ranks, which a stream inside of tiles in "
                "space cannot do; leave out mesh.space or the stream"
            )
        gathered = halo.gather_sums(own, self.grid.size, space_group(self.grid))
        seen = [0] * self.grid.size
        rows = []
        for rank in ranks:
            rows.append(gathered[rank, seen[rank]])
            seen[rank] += 1
        return torch.stack(rows)

    def own_parts(self, unit: TracedOp, tiles: Sequence[StreamedTile], parts: Tensor) -> Tensor:
        """Of the parts from all tiles, those of this rank; zeros if this rank is inactive, so that they have no gradient."""
        over = group_of(unit)
        if over is not None:
            name, _, is_inactive = over
            own = parts.chunk(dist_size(name))[dist_rank(name)]
            return torch.zeros_like(own) if is_inactive else own
        if self.is_single_rank:
            return parts
        ranks = [self.rank_of(tile.number) for tile in tiles if any(given is unit for given, _ in tile.parts)]
        return parts[[n for n, rank in enumerate(ranks) if rank == self.grid.index]]

    def add_up_over_copies(self, unit: TracedOp, grad: Tensor) -> Tensor:
        """The gradient of a total over several copies of the model, from this copy's gradient, which all of its ranks have."""
        over = group_of(unit)
        return grad if over is None else halo.add_sums(grad, over[0]) / self.grid.size

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the ranks, in one message per dtype."""
        if self.is_single_rank or not tensors:
            return list(tensors)
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            numbers = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
            total = halo.add_sums(torch.cat([tensors[n].reshape(-1) for n in numbers]), space_group(self.grid))
            sizes = [tensors[n].numel() for n in numbers]
            found.update({n: part.view(tensors[n].shape) for n, part in zip(numbers, total.split(sizes), strict=True)})
        return [found[n] for n in range(len(tensors))]


def group_of(unit: TracedOp) -> tuple[str, int, bool] | None:
    """For a reduction over several copies of the model: the group's name, how many of its ranks have the same input, and
    whether this rank is inactive; else None."""
    return unit.node.args[-3:] if unit.node.op is BATCH_NORM_OVER else None  # type: ignore[return-value]


def dist_size(name: str) -> int:
    return resolve_process_group(name).size()


def dist_rank(name: str) -> int:
    return resolve_process_group(name).rank()


def _within(outer: Box, inner: Box) -> tuple[slice, ...]:
    return tuple(slice(i.start - o.start, i.stop - o.start) for o, i in zip(outer, inner, strict=True))
