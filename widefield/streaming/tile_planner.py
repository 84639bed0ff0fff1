"""How each operation runs tile after tile, by the same rules as tiles in space.

A virtual grid has a place for every tile in time, and a value's layout on it says which pixels belong to which tile.  A rule is
asked once with these layouts, to find the axes of the grid along which an operation can be cut.  It is asked again for the box
that a tile needs, which with its halo is larger than what the tile owns.  An operation that no rule cuts runs on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from widefield.capture import recorder
from widefield.capture.ir import Graph, Node, Value
from widefield.capture.node_rules import Refused, description_of, rule_of
from widefield.geometry.box import Box
from widefield.geometry.interval import natural_cut
from widefield.geometry.layout import Cut, Grid, Layout, layout_of
from widefield.rules import RULES, Description, Local, Reduced, Windowed
from widefield.streaming.tile_ops import (
    NEW,
    Boxed,
    TileOp,
    call_whole,
    new_step,
    part_step,
    pointwise_step,
    windowed_step,
)  # fmt: skip
from widefield.tiled.pointwise import SAME_PIXELS
from widefield.tiled.redistribute import base_layout, following_cuts

aten = torch.ops.aten
POINTWISE = SAME_PIXELS | recorder.POINTWISE | {aten.fill.Scalar, aten.fill.Tensor, aten.zero.default}


@dataclass(eq=False)
class TracedOp:
    """A unit of a schedule: an operation, or a part of one.  `reads` and `outs` are as those of a Node; `node` is its origin.

    A unit with `step` runs for every tile.  One with `part` runs for the tiles that differ along `axes`, and `merge` reduces
    their results.  One with `call` runs once.
    wide: the numbers of the reads that are cut but needed whole, so that they have to be kept.
    why: why it does not run in tiles along all axes along which its reads are cut; "" if it does.
    """

    node: Node
    reads: list[Value]
    outs: list[Value | None]
    step: Callable[[dict[int, Box]], TileOp] | None = None
    part: Callable[[int], TileOp] | None = None
    call: Callable[[list[Tensor]], list[Any]] | None = None
    merge: Callable[[Tensor], Tensor] | None = None
    wide: frozenset[int] = frozenset()
    axes: tuple[int, ...] = ()
    is_pointwise: bool = False
    why: str = ""

    def __repr__(self) -> str:
        kind = "tiled" if self.step else "parts" if self.part else "once"
        return f"{kind} {self.node.op}({self.reads}) -> {self.outs}"


@dataclass
class TracedOps:
    """All units, in order, and the layout on the virtual grid of each value that is cut."""

    units: list[TracedOp] = field(default_factory=list)
    layouts: dict[Value, Layout] = field(default_factory=dict)


def units_of(graph: Graph, grid: Grid, inputs: Mapping[Value, Layout]) -> TracedOps:
    """Plan how to run `graph` in the tiles of the virtual grid.  inputs: the layouts of inputs that are cut."""
    found = TracedOps(layouts=dict(inputs))
    _GraphReader(graph, grid, found).read()
    return found


# ---------------------------------------------------------------------------------------------- reading the rules


class _GraphReader:
    def __init__(self, graph: Graph, grid: Grid, found: TracedOps) -> None:
        self.graph, self.grid, self.found = graph, grid, found
        self.count = max((value.number for node in graph.nodes for value in [*node.reads, *filter(None, node.outs)]), default=0)

    def read(self) -> None:
        for node in self.graph.nodes:
            self._read(node)

    def _layouts(self, node: Node) -> list[Layout | None]:
        return [self.found.layouts.get(value) for value in node.reads]

    def _read(self, node: Node) -> None:
        layouts = self._layouts(node)
        if node.op in NEW and self._is_large(node.outs[0]):
            self._new(node)
        elif node.draws or not any(layout is not None and layout.is_cut for layout in layouts):
            self._once(node, layouts)
        elif node.op in POINTWISE or (torch.Tag.pointwise in getattr(node.op, "tags", ()) and node.op not in RULES):
            self._pointwise(node, layouts)
        elif rule_of(node) is None:
            self._once(node, layouts, why="no file in ops/ has a rule for it")
        elif (why := self._by_rule(node, layouts)) is not None:
            self._once(node, layouts, why=why)

    # ------------------------------------------------------------------------------------------ kinds of units

    def _once(self, node: Node, layouts: list[Layout | None], why: str = "") -> None:
        """Add a unit that runs once, on the whole; results with the shape of a cut argument get its layout."""
        reads = node.reads
        wide = frozenset(n for n, layout in enumerate(layouts) if layout is not None and layout.is_cut)
        if asks_shape_alone(node) or node.op in NEW:
            wide = frozenset()
        for out in node.outs:
            like = next((layouts[n] for n in range(len(reads)) if layouts[n] and out and reads[n].shape == out.shape), None)
            if like is not None and out is not None:
                self.found.layouts[out] = like
        self.found.units.append(TracedOp(node, reads, node.outs, call=partial(call_whole, node), wide=wide, why=why))

    def _is_large(self, out: Value | None) -> bool:
        """Whether the last dims of a tensor are long enough to be cut into all tiles."""
        sizes = self.grid.sizes
        return (
            out is not None
            and out.ndim > len(sizes)
            and all(n >= size for n, size in zip(out.shape[-len(sizes) :], sizes, strict=True))
        )

    def _new(self, node: Node) -> None:
        """Add a unit that makes a tensor of one number, tile by tile."""
        (out,), sizes = node.outs, self.grid.sizes
        assert out is not None
        first = out.ndim - len(sizes)
        cuts = [Cut((axis,), natural_cut(out.shape[first + axis], size)) for axis, size in enumerate(sizes)]
        self.found.layouts[out] = layout_of(out.shape, (*[None] * first, *cuts), self.grid)
        self.found.units.append(TracedOp(node, node.reads, node.outs, step=partial(new_step, node), is_pointwise=True))

    def _pointwise(self, node: Node, layouts: list[Layout | None]) -> None:
        out = next(out for out in node.outs if out is not None)
        layout = _common_layout([(v, lay) for v, lay in zip(node.reads, layouts, strict=True)], out.shape, self.grid)
        self._cut(node.outs, [layout] * len(node.outs))
        step = partial(pointwise_step, node, out.shape)
        self.found.units.append(
            TracedOp(node, node.reads, node.outs, step=step, is_pointwise=True, wide=self._wide(layouts, layout))
        )

    def _wide(self, layouts: Sequence[Layout | None], out: Layout) -> frozenset[int]:
        """The numbers of reads that are cut along an axis along which the result is not."""
        cut = {n: set(lay.axes) for n, lay in enumerate(layouts) if lay is not None}
        return frozenset(n for n, axes in cut.items() if axes - set(out.axes))

    def _cut(self, outs: Sequence[Value | None], layouts: Sequence[Layout | None]) -> None:
        for out, layout in zip(outs, layouts, strict=False):
            if out is not None and layout is not None and layout.is_cut:
                self.found.layouts[out] = layout

    def _by_rule(self, node: Node, layouts: list[Layout | None]) -> str | None:
        """Add units for an operation that are cut along as many axes as its rule allows; if along none, the reason why."""
        used = sorted({axis for layout in layouts if layout is not None for axis in layout.axes})
        why, first = "", len(self.found.units)
        for count in range(len(used), 0, -1):
            for axes in combinations(used, count):
                kept = [_only(layout, axes) for layout in layouts]
                if not any(kept):  # a dim that is cut along several axes is not cut along one of them
                    continue
                description = description_of(node, kept)
                if isinstance(description, Refused):
                    why = why or f"its rule refuses: {description.why.partition(';')[0]}"
                elif self._described(node, layouts, kept, description, set(axes)):
                    for unit in self.found.units[first:]:
                        unit.why = why
                    return None
                else:
                    why = why or _no_turns(description)
        return why or "a dim of it is cut along several axes of tiles at once"

    def _described(self, node: Node, given: list, kept: list[Layout | None], d: Description, axes: set[int]) -> bool:
        if isinstance(d, Windowed):
            return self._windowed(node, given, kept, d)
        if isinstance(d, Local) and (whole := _read_whole(d)):
            kept = _wanted(d, len(kept))
            again = description_of(node, kept) if any(kept) else None
            return isinstance(again, Local) and self._boxed(node, given, kept, again, whole)
        if isinstance(d, Local) or (isinstance(d, Reduced) and not _cut_dims(d, axes)):
            return self._boxed(node, given, kept, d)
        if isinstance(d, Reduced) and d.by_parts and _cut_dims(d, axes) == axes:
            boxed = description_of(node, [None if layout is None else _halves(layout) for layout in kept])
            if isinstance(boxed, Windowed):  # for two tiles the rule needs windows and no reduction
                return self._windowed(node, given, kept, boxed)
            return self._gathered(node, given, kept, d)
        return False

    def _windowed(self, node: Node, given: list, kept: list[Layout | None], d: Windowed) -> bool:
        main = next((read for read in d.reads if kept[read.tensor.number] is not None), d.reads[0])
        main = replace(main, tensor=replace(main.tensor, layout=kept[main.tensor.number]))
        cuts = [following_cuts(main, out.shape) if out.cuts is None else out.cuts for out in d.outs]
        layouts = [layout_of(out.shape, cut, self.grid) for out, cut in zip(d.outs, cuts, strict=True)]
        if not layouts[0].is_cut:
            return False
        if not {meta for meta in range(len(kept)) if kept[meta] is not None and kept[meta].is_cut} <= {
            r.tensor.number for r in d.reads
        }:  # type: ignore
            return False
        self._cut(node.outs, layouts)
        wide = self._wide(given, layouts[0])
        self.found.units.append(TracedOp(node, node.reads, node.outs, step=partial(windowed_step, node, d), wide=wide))
        return True

    def _boxed(
        self, node: Node, given: list, kept: list[Layout | None], d: Local | Reduced, whole: frozenset[int] = frozenset()
    ) -> bool:
        """whole: the numbers of cut reads of which every tile reads the whole."""
        boxed = Boxed.of(node, kept, d)
        if boxed is None:
            return False
        layouts = boxed.out_layouts
        if not any(layout is not None and layout.is_cut for layout in layouts):
            return False
        small = self._uncut(node, layouts)
        if any(small) and not isinstance(d, Reduced):
            return False
        if any(small):
            self.found.units.append(TracedOp(node, node.reads, small, call=boxed.uncut_outputs))
        self._cut(node.outs, layouts)
        first = next(layout for layout in layouts if layout is not None and layout.is_cut)
        wide = self._wide(given, first) | whole
        self.found.units.append(TracedOp(node, node.reads, node.outs, step=boxed.step, wide=wide))
        return True

    def _gathered(self, node: Node, given: list, kept: list[Layout | None], d: Reduced) -> bool:
        boxed = Boxed.of(node, kept, d)
        if boxed is None:
            return False
        total = self._new_value(node)
        self.found.units.append(
            TracedOp(
                node,
                node.reads,
                [total],
                part=partial(part_step, node, kept),
                merge=d.merge,
                axes=tuple(boxed.extents),
                wide=self._wide(given, boxed.layout),
            )
        )
        layouts = boxed.out_layouts
        small = self._uncut(node, layouts)
        large = [
            out if out is not None and lay is not None and lay.is_cut else None
            for out, lay in zip(node.outs, layouts, strict=True)
        ]
        if any(out is not None for out in small):
            self.found.units.append(TracedOp(node, [total, *node.reads], small, call=boxed.reduced_outputs))
        if any(out is not None for out in large):
            self._cut(node.outs, layouts)
            self.found.units.append(TracedOp(node, [total, *node.reads], large, step=boxed.finish_step))
        return True

    def _uncut(self, node: Node, layouts: Sequence[Layout | None]) -> list[Value | None]:
        """The results that are not cut."""
        return [None if layout is not None and layout.is_cut else out for out, layout in zip(node.outs, layouts, strict=True)]

    def _new_value(self, node: Node) -> Value:
        self.count += 1
        return Value(
            self.count,
            (),
            torch.float64,
            node.reads[0].device,
            (),
            name="total",
            wants_grad=any(v.wants_grad for v in node.reads),
        )


def _read_whole(d: Local) -> frozenset[int]:
    """The numbers of the reads that are cut, and of which the rule wants the whole for every tile."""
    pairs = zip(d.reads, d.layouts or (), strict=False)
    return frozenset(meta.number for meta, wanted in pairs if meta.is_cut and wanted is not None and not wanted.is_cut)


def _wanted(d: Local, count: int) -> list[Layout | None]:
    """For each tensor argument the cut layout that the rule wants it in, also where it is plain now; None for the whole."""
    wanted = {meta.number: layout for meta, layout in zip(d.reads, d.layouts or (), strict=False)}
    found = [wanted.get(number) for number in range(count)]
    return [layout if layout is not None and layout.is_cut else None for layout in found]


def _no_turns(d: Description) -> str:
    """Why an operation whose rule says `d` cannot run tile after tile."""
    if isinstance(d, Reduced) and not d.by_parts:
        return "its reduction over all pixels cannot be merged from tiles' parts"
    if isinstance(d, (Local, Reduced, Windowed)):
        return "its rule moves cuts to other dims, or cuts nothing of its result"
    return f"its rule ({type(d).__name__}) is for tiles in space only"


def asks_shape_alone(node: Node) -> bool:
    """Whether a draw reads only the shape and memory format of its argument, as in-place draws and `rand_like` do."""
    return node.draws and len(node.reads) == 1 and (isinstance(node.op, partial) or node.op in LIKE)


LIKE: set[Any] = {
    aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    torch.ops.widefield.dropout_mask.default,
}  # fmt: skip
"""Draws that read only the shape and memory format of their first argument."""


def _only(layout: Layout | None, axes: Sequence[int]) -> Layout | None:
    """The layout with only the cuts along `axes`; None if none is left."""
    if layout is None:
        return None
    left = layout_of(
        layout.shape, tuple(cut if cut is not None and set(cut.axes) <= set(axes) else None for cut in layout.cuts), layout.grid
    )
    return left if left.is_cut else None


def _halves(layout: Layout) -> Layout:
    """The layout of two tiles, the first as long as before."""
    grid = Grid((2,) * len(layout.grid.sizes))
    halves = [None if cut is None else Cut(cut.axes, (0, cut.bounds[1], cut.bounds[-1])) for cut in layout.cuts]
    return layout_of(layout.shape, tuple(halves), grid)


def _cut_dims(d: Reduced, axes: set[int]) -> set[int]:
    """The axes that cut the reduced dims."""
    layout = base_layout(d)
    return {axis for dim in d.dims if (cut := layout.cuts[dim]) is not None for axis in cut.axes}


def _common_layout(reads: Sequence[tuple[Value, Layout | None]], shape: tuple[int, ...], grid: Grid) -> Layout:
    cuts: list[Cut | None] = [None] * len(shape)
    taken: set[int] = set()
    for value, layout in reads:
        if layout is None:
            continue
        missing = len(shape) - value.ndim
        for dim, cut in enumerate(layout.cuts):
            at = dim + missing
            if cut is not None and value.shape[dim] == shape[at] and cuts[at] is None and not taken & set(cut.axes):
                cuts[at] = cut
                taken |= set(cut.axes)
    return layout_of(shape, tuple(cuts), grid)
