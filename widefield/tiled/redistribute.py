"""Changes of layout: which boxes a rank has, which it needs, and the exchange between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.halo import Move
from widefield.geometry.box import Box, full_box, is_empty
from widefield.geometry.interval import Interval, even_cut
from widefield.geometry.layout import CACHE_SIZE, Cut, Cuts, Grid, Layout, layout_of
from widefield.rules import Local, Meta, Read, Reduced
from widefield.tiled.gather_watch import note_gathered
from widefield.tiled.tensor import TiledTensor

NOTHING = Interval(0, 0)


def first_cut(metas: Sequence[Meta]) -> Meta:
    """The first tensor that is cut, whose layout others follow; else the first."""
    return next((meta for meta in metas if meta.is_cut), metas[0])


def base_layout(d: Local | Reduced) -> Layout:
    """The layout of the first read of a description, which its `whole` or `dims`, `outs` and `run` are about."""
    layout = first_cut(d.reads).layout if d.layouts is None else d.layouts[0]
    assert layout is not None, "an operation without a tiled tensor is plain"
    return layout


def boxes_of(meta: Meta, grid: Grid) -> tuple[Box, ...]:
    """Each rank's box of a tensor; all of it for a plain tensor."""
    if meta.layout is not None:
        return meta.layout.boxes
    return (full_box(meta.shape),) * grid.size


_MOVES: dict[tuple, Move] = {}


def move_for(layout: Layout, wanted: tuple[Box, ...]) -> Move:
    """The exchange that gives each rank its `wanted` box of a tensor by `layout`; cached, so equal ones are one object."""
    key = (layout, wanted)
    if key not in _MOVES:
        if len(_MOVES) >= CACHE_SIZE:
            _MOVES.clear()
        sources = None if layout.num_shards == layout.grid.size else layout.sources
        _MOVES[key] = halo.move_of(layout.grid.index, layout.boxes, wanted, sources)
    return _MOVES[key]


def wanted_by(read: Read, writes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The box of a read tensor that each rank needs to compute its box, of `writes`, of an output of `shape`."""
    return tuple(wanted_box(read, write, shape) for write in writes)


def wanted_box(read: Read, write: Box, shape: tuple[int, ...]) -> Box:
    """The box of a read tensor that is needed to compute the box `write` of an output of `shape`; padding is left out."""
    meta = read.tensor
    if is_empty(write):
        return (NOTHING,) * meta.ndim
    box = []
    for dim, extent in enumerate(meta.shape):
        if dim in read.reach:
            interval = read.reach[dim].input_read_by(write[dim]) & Interval(0, extent)
            box.append(interval if len(interval) else NOTHING)
        else:
            same = dim < len(shape) and extent == shape[dim]
            box.append(write[dim] if same else Interval(0, extent))
    return tuple(box)


def following_cuts(read: Read, shape: tuple[int, ...]) -> Cuts:
    """The cuts of an output of `shape` that follow from those of a tensor it reads."""
    cuts: list[Cut | None] = []
    for dim, cut in enumerate(read.tensor.cuts):
        if cut is not None and dim in read.reach:
            cut = Cut(cut.axes, read.reach[dim].cut_of(cut.bounds))
        cuts.append(cut)
    return tuple(cuts[: len(shape)]) + (None,) * (len(shape) - len(cuts))


def move_cuts(layout: Layout, whole: Sequence[int]) -> Layout:
    """`layout` with the dims in `whole` uncut.  Their cuts move to the longest uncut dim outside of `whole`.

    If no such dim has a pixel for every shard, the cut is dropped, and redistributing gathers.
    """
    cuts = list(layout.cuts)
    for dim in whole:
        cut, cuts[dim] = cuts[dim], None
        if cut is None:
            continue
        num_shards = layout.grid.num_shards(cut.axes)
        free = [d for d in range(len(cuts)) if cuts[d] is None and d not in whole and layout.shape[d] >= num_shards]
        if free:
            target = max(free, key=lambda d: (layout.shape[d], -d))
            cuts[target] = Cut(cut.axes, even_cut(layout.shape[target], num_shards))
    return layout_of(layout.shape, tuple(cuts), layout.grid)


def num_shards_of(meta: Meta) -> int:
    """The number of tiles of a tensor; 1 for a plain tensor."""
    return 1 if meta.layout is None else meta.layout.num_shards


# ---------------------------------------------------------------------------------------------- redistribute


def redistribute(tensor: TiledTensor, layout: Layout) -> Tensor:
    """This rank's tile of a tensor by another layout of its shape; below autograd."""
    if tensor.tile_layout is layout:
        return tensor.local
    if tensor.tile_layout.is_cut and not layout.is_cut:
        note_gathered(tensor)
    move = move_for(tensor.tile_layout, layout.boxes)
    (tile,) = halo.gather([move], [tensor.local], space_group(layout.grid))
    return tile


def tile_by(tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's tile, by `layout`, of a tensor of the layout's shape: tiled ones are redistributed, plain ones cut."""
    if type(tensor) is TiledTensor:
        return redistribute(tensor, layout)
    return tensor[tuple(slice(interval.start, interval.stop) for interval in layout.box)] if layout.is_cut else tensor


def to_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a tensor that broadcasts against `layout`; its dims of another extent stay uncut."""
    if type(tensor) is TiledTensor and tensor.tile_layout is layout:
        return tensor.local
    missing = len(layout.shape) - tensor.ndim
    there = zip(tensor.shape, layout.shape[missing:], layout.cuts[missing:], strict=True)
    wanted = tuple(cut if extent == whole else None for extent, whole, cut in there)  # else it broadcasts
    return tile_by(tensor, layout_of(tuple(tensor.shape), wanted, layout.grid))


def whole_of(tensor: TiledTensor) -> Tensor:
    """All pixels of a tiled tensor, on every rank; below autograd."""
    return redistribute(tensor, layout_of(tensor.tile_layout.shape, (None,) * tensor.ndim, tensor.tile_layout.grid))


def space_group(grid: Grid) -> str:
    """The name of the process group of all ranks of a grid; "" for one rank."""
    return grid.group_name(tuple(range(len(grid.sizes)))) if grid.size > 1 else ""


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `permute(order)`."""
    return sorted(range(len(order)), key=order.__getitem__)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's memory has no gaps and no overlap, in whatever order of dims."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """A dense tensor's strides; for others those of a row-major tensor."""
    return tuple(tensor.stride()) if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def memory_of(tensor: Tensor) -> Tensor:
    """A 1-D view of a dense tensor's elements in the order of memory, as messages need it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def local_of(tensor: Tensor) -> Tensor:
    """A tiled tensor's tile; a plain tensor itself."""
    return tensor.local if type(tensor) is TiledTensor else tensor
