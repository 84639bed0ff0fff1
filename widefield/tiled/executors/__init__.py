"""Executes what a rule describes: moves pixels between ranks, runs the local operation on tiles, and wraps the result.

A builder takes a description, computes boxes and messages once, and returns a function of the operation's tensor arguments.
The dispatcher caches that function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from widefield.comm import halo
from widefield.geometry.layout import Grid, Layout, layout_of
from widefield.rules import Additive, Description, Local, PartialSum, Reduced, Ring, ShardedProduct, Tile, Windowed
from widefield.tiled.executors.additive import build_additive, finish_total
from widefield.tiled.executors.ring import build_ring, build_sharded_product
from widefield.tiled.executors.windowed import build_windowed
from widefield.tiled.redistribute import base_layout, first_cut, local_of, move_cuts, to_layout
from widefield.tiled.tensor import wrap, wrap_view
from widefield.tiled.view_writeback import attach_writeback

Execute = Callable[[Sequence[Tensor]], Any]
View = Callable[[tuple[int, ...]], "Sequence[tuple[int, ...] | None]"]
"""From the strides of a whole tensor to those of its views; None for a view where torch would have to copy."""


def build(description: Description, grid: Grid, view: View | None = None) -> Execute:
    """The function that executes a description on this rank; view: given where the operation is a view."""
    if isinstance(description, Windowed):
        return build_windowed(description, grid)
    if isinstance(description, Additive):
        return build_additive(description, grid)
    if isinstance(description, Reduced):
        return _reduced(description, grid)
    if isinstance(description, Local):
        return _local(description, grid) if view is None else _view(description, grid, view)
    assert isinstance(description, (ShardedProduct, Ring)), f"a rule gave {description!r}, which is no description"
    return (
        build_sharded_product(description, grid) if isinstance(description, ShardedProduct) else build_ring(description, grid)
    )


# ---------------------------------------------------------------------------------------------- reductions


def _reduced(d: Reduced, grid: Grid) -> Execute:
    layout = base_layout(d)
    axes = tuple(sorted(axis for dim in d.dims if (cut := layout.cuts[dim]) is not None for axis in cut.axes))
    num_shards = grid.num_shards(axes)
    group = grid.group_name(axes) if num_shards > 1 else ""
    layouts = [
        layout_of(out.shape, layout.cuts if out.cuts is None else out.cuts, grid) if isinstance(out, Tile) else None
        for out in d.outs
    ]
    numbers = [meta.number for meta in d.reads]
    wanted = _layouts_of_reads(d, layout)

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = list(tensors)
        for number, to in wanted:
            tiles[number] = to_layout(tensors[number], to) if to is not None else local_of(tensors[number])
        part = d.local(*(tiles[number] for number in numbers))
        if d.merge is not None:
            total = d.merge(halo.gather_sums(part, num_shards, group) if num_shards > 1 else part.unsqueeze(0))
        else:
            total = halo.add_sums(part, group) if num_shards > 1 else part
        if d.update_buffers is not None:
            d.update_buffers(total, *tiles)
        results = (total,) if d.finish is None else d.finish(total, *tiles)
        results = results if isinstance(results, tuple) else (results,)
        wrapped = tuple(
            _wrap_result(value, out, to, layout, grid, tensors) for value, out, to in zip(results, d.outs, layouts, strict=True)
        )
        return wrapped[0] if len(wrapped) == 1 else wrapped

    return execute


def _wrap_result(value: Any, out: Any, to: Layout | None, layout: Layout, grid: Grid, tensors: Sequence[Tensor]) -> Any:
    if out is None or value is None:
        return value
    if isinstance(out, PartialSum):
        return finish_total(value, out, layout.num_shards, layout, grid, tensors)
    assert to is not None
    return _tiled(value, to)


# ---------------------------------------------------------------------------------------------- each tile by itself


def _local(d: Local, grid: Grid) -> Execute:
    layout = _local_layout(d)
    outs = [layout_of(tuple(shape), cuts or (None,) * len(shape), grid) for shape, cuts in d.outs(layout)]
    wanted = _layouts_of_reads(d, layout)

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = list(tensors)
        for number, to in wanted:
            tiles[number] = to_layout(tensors[number], to) if to is not None else local_of(tensors[number])
        results = d.run(layout, *tiles)
        if isinstance(results, Tensor):
            return _tiled(results, outs[0])
        return type(results)(_tiled(value, to) for value, to in zip(results, outs, strict=True))

    return execute


def _view(d: Local, grid: Grid, view: View) -> Execute:
    """Views get the strides that views of the whole would have, for torch decides by strides whether a reshape is a view."""
    layout, number = _local_layout(d), d.reads[0].number
    outs = [layout_of(tuple(shape), cuts or (None,) * len(shape), grid) for shape, cuts in d.outs(layout)]
    known: dict[tuple[int, ...], Sequence[tuple[int, ...] | None]] = {}

    def execute(tensors: Sequence[Tensor]) -> Any:
        source = tensors[number]
        results, strides = d.run(layout, to_layout(source, layout)), source.stride()
        if strides not in known:
            known[strides] = view(strides)
        if isinstance(results, Tensor):
            made: Any = wrap_view(results, outs[0], known[strides][0])
        else:
            made = [wrap_view(*each) for each in zip(results, outs, known[strides], strict=True)]
        attach_writeback(made, source, layout, d.run)
        return made

    return execute


def _local_layout(d: Local) -> Layout:
    main = first_cut(d.reads)
    layout = main.layout if d.layouts is None else d.layouts[0]
    assert layout is not None, "a local rule without a tiled tensor is plain"
    if d.layouts is not None:
        return layout
    return move_cuts(layout, [dim % max(1, main.ndim) for dim in d.whole])


def _layouts_of_reads(d: Reduced | Local, layout: Layout) -> list[tuple[int, Layout | None]]:
    """The number of each read and the layout that its tile must have; None: as it is."""
    layouts = (layout,) * len(d.reads) if d.layouts is None else d.layouts
    return [(meta.number, to) for meta, to in zip(d.reads, layouts, strict=True)]


def _tiled(value: Tensor, layout: Layout) -> Tensor:
    """A result as a tiled tensor; a single number stays plain."""
    return value if value.ndim == 0 else wrap(value, layout)
