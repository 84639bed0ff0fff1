"""Carries out what a rule describes: finds the boxes once, then moves pixels, runs the local operation and wraps the result.

Each builder takes a description and gives a function of the operation's tensor arguments, kept by the caller.
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
from widefield.tiled.redistribute import first_cut, local_of, moved, to_layout
from widefield.tiled.tensor import wrap, wrap_view
from widefield.tiled.view_writeback import attach_writeback

Execute = Callable[[Sequence[Tensor]], Any]
View = Callable[[tuple[int, ...]], "Sequence[tuple[int, ...] | None]"]
"""From the strides of a whole to those of its views; None where torch would not show them so."""


def build(description: Description, grid: Grid, view: View | None = None) -> Execute:
    """The function that carries out a description on this rank; view: what the operation is on a whole, where it is a view."""
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
    layout = first_cut(d.reads).layout if d.at is None else d.at[0]
    assert layout is not None, "a reduction without a tiled tensor is plain"
    axes = tuple(sorted(axis for dim in d.dims if (cut := layout.cuts[dim]) is not None for axis in cut.axes))
    ways = grid.num_shards(axes)
    group = grid.group_name(axes) if ways > 1 else ""
    layouts = [
        layout_of(out.shape, layout.cuts if out.cuts is None else out.cuts, grid) if isinstance(out, Tile) else None
        for out in d.outs
    ]
    numbers = [meta.number for meta in d.reads]
    wanted = _layouts_wanted(d, layout)

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = list(tensors)
        for number, to in wanted:
            tiles[number] = to_layout(tensors[number], to) if to is not None else local_of(tensors[number])
        part = d.local(*(tiles[number] for number in numbers))
        if d.merge is not None:
            total = d.merge(halo.gather_sums(part, ways, group) if ways > 1 else part.unsqueeze(0))
        else:
            total = halo.add_sums(part, group) if ways > 1 else part
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
    return value if value.ndim == 0 else wrap(value, to)


# ---------------------------------------------------------------------------------------------- each tile by itself


def _local(d: Local, grid: Grid) -> Execute:
    layout = _local_layout(d)
    outs = [layout_of(tuple(shape), cuts or (None,) * len(shape), grid) for shape, cuts in d.outs(layout)]
    wanted = _layouts_wanted(d, layout)
    wrapped = _wrapper(d)

    def execute(tensors: Sequence[Tensor]) -> Any:
        tiles = list(tensors)
        for number, to in wanted:
            tiles[number] = to_layout(tensors[number], to) if to is not None else local_of(tensors[number])
        results = d.run(layout, *tiles)
        if isinstance(results, Tensor):
            return wrapped(results, outs[0])
        return type(results)(wrapped(value, to) for value, to in zip(results, outs, strict=True))

    return execute


def _view(d: Local, grid: Grid, view: View) -> Execute:
    """Views have the strides that a whole's would: torch asks for them before it shows memory in another way, or copies."""
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
    layout = main.layout if d.at is None else d.at[0]
    assert layout is not None, "a local rule without a tiled tensor is plain"
    if d.at is not None:
        return layout
    whole = [dim % max(1, main.ndim) for dim in d.whole]
    return moved(layout, whole, [dim % max(1, main.ndim) for dim in d.keep])


def _layouts_wanted(d: Reduced | Local, layout: Layout) -> list[tuple[int, Layout | None]]:
    """The number of each read and the layout that its tile must have; None: as it is."""
    at = (layout,) * len(d.reads) if d.at is None else d.at
    return [(meta.number, to) for meta, to in zip(d.reads, at, strict=True)]


def _wrapper(d: Local) -> Callable[[Tensor, Layout], Tensor]:
    """Results as tiled tensors, a single number as a plain one."""
    return lambda value, to: value if value.ndim == 0 else wrap(value, to)
