"""Executes windowed rules: on the tile joined with its halo, or on the tile while the halo travels and then on its edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.halo import Move, Piece
from widefield.geometry.box import Box, is_empty, meet, rest_of, size_of, within
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Grid, Layout, layout_of
from widefield.private_torch.fake_tensors import is_eager
from widefield.rules import LocalBoxes, Read, Tile, Windowed
from widefield.tiled.redistribute import boxes_of, following_cuts, local_of, move_for, space_group, wanted_box, wanted_by
from widefield.tiled.tensor import wrap

Execute = Callable[[Sequence[Tensor]], Any]
Rest = Callable[[Sequence[Tensor]], list[Tensor]]
SMALL_SHARE = 0.25
"""Edges are computed apart from the tile only while they are at most this share of its output; else it pays to wait."""


class _ReadSource:
    """One read of a Windowed description: which box this rank has of the tensor, which it needs, and the exchange."""

    def __init__(self, read: Read, writes: Sequence[Box], shape: tuple[int, ...], grid: Grid) -> None:
        self.number = read.tensor.number
        self.read = read
        wanted = wanted_by(read, writes, shape)
        self.wanted = wanted[grid.index]
        self.tiled = read.tensor.layout is not None
        self.move: Move | None = move_for(read.tensor.layout, wanted) if read.tensor.layout is not None else None
        self.owned = boxes_of(read.tensor, grid)[grid.index]

    @property
    def is_idle(self) -> bool:
        return self.move is None or self.move.is_idle

    def take(self, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The needed box: this rank's tile of `tensor`, joined with the received pieces."""
        tile = local_of(tensor)
        if self.move is not None:
            return halo.assemble(self.move, tile, pieces)
        return tile if self.wanted == self.owned else tile[within(self.owned, self.wanted)]


def build_windowed(d: Windowed, grid: Grid) -> Execute:
    """The function that executes a Windowed description on this rank."""
    main = next((read for read in d.reads if read.tensor.is_cut), d.reads[0])
    layouts = [layout_of(out.shape, following_cuts(main, out.shape) if out.cuts is None else out.cuts, grid) for out in d.outs]
    writes, write = layouts[0].boxes, layouts[0].box
    sources = [_ReadSource(read, writes, d.outs[0].shape, grid) for read in d.reads]
    group = space_group(grid)
    finish = _wrapper(d.outs, layouts, d.reads[0].tensor.number)
    rest = rest_of_tensors([source.number for source in sources])
    moving = [source for source in sources if source.move is not None]  # the same on every rank
    halo_moves = moving if any(not source.is_idle for source in moving) else []
    moves = [source.move for source in halo_moves if source.move is not None]
    joined = None if is_empty(write) else d.prepare(LocalBoxes(tuple(source.wanted for source in sources), write))
    edges = _edges(d, sources, writes, grid) if d.splits and len(sources) == 1 and halo_moves else None
    if edges is not None:
        return _split(d, sources[0], edges, write, rest, finish, group)

    def execute(tensors: Sequence[Tensor]) -> Any:
        pieces: dict[_ReadSource, Sequence[Piece]] = {}
        if halo_moves:
            pending = halo.start(moves, [local_of(tensors[s.number]) for s in halo_moves], group)
            for source, got in zip(halo_moves, pending.wait(), strict=True):
                pieces[source] = got
                _save_halo(tensors[source.number], source.move, got)
        if joined is None:
            return finish(None, tensors)
        taken = [source.take(tensors[source.number], pieces.get(source, ())) for source in sources]
        return finish(joined(*taken, *rest(tensors)), tensors)

    return execute


def _save_halo(tensor: Tensor, move: Move | None, pieces: Sequence[Piece]) -> None:
    """Save the halo of a tensor that needs no gradient: a convolution's backward reads it for the weight's gradient.

    One per exchange: two convolutions may read different halos of a tensor, and all ranks must agree on which are saved.
    """
    if not tensor.requires_grad and is_eager(getattr(tensor, "local", None)):
        saved = getattr(tensor, "saved_halos", None) or {}
        saved[id(move)] = (move, pieces)
        tensor.saved_halos = saved  # type: ignore[attr-defined]


def _edges(d: Windowed, sources: list[_ReadSource], writes: Sequence[Box], grid: Grid) -> list[tuple[Box, Box]] | None:
    """The boxes of the output that need the halo, and what each reads; None where they are too large a share of the tile."""
    source, write = sources[0], writes[grid.index]
    own = meet(source.owned, source.wanted)
    if is_empty(write) or is_empty(own):
        return None
    inner = tuple(_inner(source.read, dim, write[dim], own[dim]) for dim in range(len(write)))
    slabs = rest_of(write, inner) if not is_empty(inner) else [write]
    pixels = torch.Size(size_of(write)).numel()
    if sum(torch.Size(size_of(slab)).numel() for slab in slabs) > SMALL_SHARE * pixels:
        return None
    return [(slab, wanted_box(source.read, slab, d.outs[0].shape)) for slab in slabs]


def _inner(read: Read, dim: int, write: Interval, own: Interval) -> Interval:
    """The output pixels of one dim that read only this tile's pixels."""
    if dim not in read.reach:
        return write
    reach, whole = read.reach[dim], Interval(0, read.tensor.shape[dim])

    def away(outputs: Iterable[int]) -> int:
        """How many outputs come before the first that reads only this tile, less those at the end that read nothing."""
        last = 0
        for count, output in enumerate(outputs, 1):
            got = reach.input_read_by(Interval(output, output + 1)) & whole
            if len(got) and own.start <= got.start and got.stop <= own.stop:
                break
            last = count if len(got) else last
        return last

    start = write.start + away(range(write.start, write.stop))
    return Interval(start, write.stop - away(range(write.stop - 1, start - 1, -1)))


def _split(
    d: Windowed,
    source: _ReadSource,
    edges: list[tuple[Box, Box]],
    write: Box,
    rest: Rest,
    finish: Callable[..., Any],
    group: str,
) -> Execute:
    """Run on this rank's tile while the halo travels, then compute the edges again on strips that have the halo."""
    assert source.move is not None
    move, own = source.move, meet(source.owned, source.wanted)
    inner = d.prepare(LocalBoxes((own,), write))
    strips = [
        (
            within(write, out),
            Move(source.owned, strip, halo.Route((), (), meet(source.owned, strip))),
            d.prepare(LocalBoxes((strip,), out)),
        )
        for out, strip in edges
    ]
    at = None if own == source.owned else within(source.owned, own)

    def execute(tensors: Sequence[Tensor]) -> Any:
        tile, others = local_of(tensors[source.number]), rest(tensors)
        pending = halo.start([move], [tile], group)
        out = inner(tile if at is None else tile[at], *others)
        (pieces,) = pending.wait()
        _save_halo(tensors[source.number], move, pieces)
        for where, strip, run in strips:
            of_strip = [
                (box, piece[within(whole, box)]) for whole, piece in pieces if not is_empty(box := meet(whole, strip.wanted))
            ]
            _overwrite(out, where, run(halo.assemble(strip, tile, of_strip), *others))
        return finish(out, tensors)

    return execute


def _overwrite(out: Any, where: tuple[slice, ...], edge: Any) -> None:
    if isinstance(out, Tensor):
        out[where] = edge
    else:
        for part, new in zip(out, edge, strict=True):
            part[where] = new


def rest_of_tensors(numbers: Sequence[int]) -> Rest:
    """The tensor arguments other than those in `numbers`, tiled ones as their tiles."""
    taken = frozenset(numbers)

    def rest(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [local_of(tensor) for n, tensor in enumerate(tensors) if n not in taken]

    return rest


def _wrapper(outs: Sequence[Tile], layouts: Sequence[Layout], first: int) -> Callable[[Any, Sequence[Tensor]], Any]:
    """Wrap the local operation's result; None, where this rank's tiles are empty, becomes empty tiles."""

    def finish(result: Any, tensors: Sequence[Tensor]) -> Any:
        if result is None:
            like = tensors[first]
            parts = [
                torch.zeros(layout.tile_shape, dtype=out.dtype or like.dtype, device=like.device)
                for out, layout in zip(outs, layouts, strict=True)
            ]
        else:
            parts = [result] if isinstance(result, Tensor) else list(result)
        wrapped = [wrap(part, layout) for part, layout in zip(parts, layouts, strict=True)]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    return finish
