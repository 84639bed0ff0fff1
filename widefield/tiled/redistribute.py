"""Where do a tensor's pixels live, which of them does a rank want, and how does a tensor come to another layout?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.comm.halo import Move
from widefield.geometry.box import Box, full_box, is_empty
from widefield.geometry.interval import Interval, even_cut
from widefield.geometry.layout import CACHE_SIZE, Cut, Cuts, Grid, Layout, layout_of
from widefield.rules import Meta, Read
from widefield.tiled.gather_watch import note_gathered
from widefield.tiled.tensor import TiledTensor

NOTHING = Interval(0, 0)


def first_cut(metas: Sequence[Meta]) -> Meta:
    """The tensor whose layout the others follow: the first that is cut, else the first."""
    return next((meta for meta in metas if meta.is_cut), metas[0])


def boxes_of(meta: Meta, grid: Grid) -> tuple[Box, ...]:
    """What each rank holds of a tensor."""
    if meta.layout is not None:
        return meta.layout.boxes
    return (full_box(meta.shape),) * grid.size


_MOVES: dict[tuple, Move] = {}


def move_for(layout: Layout, wanted: tuple[Box, ...]) -> Move:
    """The exchange by which each rank gets its `wanted` box of a tensor laid out so; the same object for equal ones."""
    key = (layout, wanted)
    if key not in _MOVES:
        if len(_MOVES) >= CACHE_SIZE:
            _MOVES.clear()
        sources = None if layout.num_shards == layout.grid.size else layout.sources
        _MOVES[key] = halo.move_of(layout.grid.index, layout.boxes, wanted, sources)
    return _MOVES[key]


def wanted_by(read: Read, writes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Box, ...]:
    """What each rank must have of a read tensor to write its box of an output of `shape`."""
    return tuple(wanted_box(read, write, shape) for write in writes)


def wanted_box(read: Read, write: Box, shape: tuple[int, ...]) -> Box:
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


def moved(layout: Layout, whole: Sequence[int]) -> Layout:
    """`layout` with the dims in `whole` uncut: their axes cut the longest dim that is free instead, or none."""
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
    """Among how many tiles a tensor's pixels are shared out."""
    return 1 if meta.layout is None else meta.layout.num_shards


# ---------------------------------------------------------------------------------------------- bringing tensors to a layout


def redistribute(tensor: TiledTensor, layout: Layout) -> Tensor:
    """The tile that `layout`, of the same shape, gives this rank."""
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
    wanted = tuple(cut if extent == whole else None for extent, whole, cut in there)  # else one pixel stands for all
    return tile_by(tensor, layout_of(tuple(tensor.shape), wanted, layout.grid))


def whole_of(tensor: TiledTensor) -> Tensor:
    """All pixels on every rank, below autograd."""
    return redistribute(tensor, layout_of(tensor.tile_layout.shape, (None,) * tensor.ndim, tensor.tile_layout.grid))


def space_group(grid: Grid) -> str:
    """The process group of all ranks of a grid."""
    return grid.group_name(tuple(range(len(grid.sizes)))) if grid.size > 1 else ""


def inverse(order: Sequence[int]) -> list[int]:
    """What `permute` takes to undo `permute(order)`."""
    return sorted(range(len(order)), key=order.__getitem__)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a run of memory, in whatever order of dims."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's strides, or where its memory has gaps those of a row-major one."""
    return tuple(tensor.stride()) if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def memory_of(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in a row, as they lie in memory: messages take no other order of dims."""
    return tensor.as_strided((tensor.numel(),), (1,))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.local if type(tensor) is TiledTensor else tensor
