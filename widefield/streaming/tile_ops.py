"""One operation on one tile: the boxes that it reads and makes, and what runs, from its rule for these boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Node
from widefield.capture.node_rules import description_of
from widefield.geometry.box import Box, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Cut, Grid, Layout, layout_of
from widefield.geometry.window import hull
from widefield.rules import Local, LocalBoxes, Reduced, Tile, Windowed
from widefield.tiled.redistribute import base_layout, wanted_box

aten = torch.ops.aten
NEW: dict[Any, int] = {
    aten.new_empty.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1, aten.new_full.default: 1,
    aten.empty.memory_format: 0, aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
}  # fmt: skip
"""Operations that make a tensor of one number, or an empty one, and the index of their size argument."""


@dataclass(frozen=True)
class TileOp:
    """One operation on one tile.

    reads: the box that it reads of each tensor argument; None: the whole.  outs: the box that it makes of each result.
    call: from the tensors to the results.
    attach_grad: from a stored result and the tensors to the same result with its autograd history, without computing it again;
        None if that is not possible.
    """

    reads: list[Box | None]
    outs: list[Box | None]
    call: Callable[[list[Tensor]], list[Any]]
    attach_grad: Callable[[Tensor, list[Tensor]], Tensor] | None = None


# ---------------------------------------------------------------------------------------------- steps


def results(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def call_whole(node: Node, tensors: list[Tensor]) -> list[Any]:
    return results(node.call(iter(tensors)))


def union(boxes: Sequence[Box]) -> Box:
    """The smallest box that contains all of these."""
    return tuple(hull(list(intervals)) for intervals in zip(*boxes, strict=True))


def broadcast_box(shape: Sequence[int], extents: Sequence[int], box: Box) -> Box:
    """The box of a broadcast operand of shape `extents` that `box` of a result of shape `shape` reads."""
    missing = len(shape) - len(extents)
    return tuple(
        box[missing + dim] if extent == shape[missing + dim] else Interval(0, extent) for dim, extent in enumerate(extents)
    )


def pointwise_step(node: Node, shape: tuple[int, ...], needs: dict[int, Box]) -> TileOp:
    box = union(list(needs.values()))
    reads = [broadcast_box(shape, value.shape, box) for value in node.reads]
    return TileOp(reads, [box if out is not None else None for out in node.outs], lambda tensors: call_whole(node, tensors))


def new_step(node: Node, needs: dict[int, Box]) -> TileOp:
    box, at = needs[0], NEW[node.op]

    def call(tensors: list[Tensor]) -> list[Any]:
        args, kwargs = node.filled(iter(tensors))
        return [node.op(*args[:at], list(size_of(box)), *args[at + 1 :], **kwargs)]

    return TileOp([(Interval(0, 0),) * value.ndim for value in node.reads], [box], call)


def windowed_step(node: Node, d: Windowed, needs: dict[int, Box]) -> TileOp:
    box = union(list(needs.values()))
    shape = d.outs[0].shape
    reads: list[Box | None] = [None] * len(node.reads)
    for read in d.reads:
        reads[read.tensor.number] = wanted_box(read, box, shape)
    numbers = [read.tensor.number for read in d.reads]
    others = [n for n in range(len(reads)) if n not in numbers]
    run = d.prepare(LocalBoxes(tuple(reads[n] for n in numbers), box))  # type: ignore[misc]

    def call(tensors: list[Tensor]) -> list[Any]:
        return results(run(*(tensors[n] for n in numbers), *(tensors[n] for n in others)))

    if not hasattr(run, "attach_grad"):
        return TileOp(reads, [box] * len(node.outs), call)
    attach_grad = run.attach_grad
    return TileOp(
        reads, [box] * len(node.outs), call, lambda out, tensors: attach_grad(out, *(tensors[n] for n in (*numbers, *others)))
    )


def part_step(node: Node, layouts: Sequence[Layout | None], tile: int) -> TileOp:
    """The part of a reduction from a tile's own pixels."""
    mine = [None if layout is None else _at(layout, tile) for layout in layouts]
    d = description_of(node, mine)
    assert isinstance(d, Reduced), f"{node.op} gave {d!r} in tile {tile}"
    reads = _read_boxes(d, len(node.reads))
    numbers = [meta.number for meta in d.reads]
    attach_grad = d.attach_grad
    return TileOp(
        reads,
        [None],
        lambda tensors: [d.local(*(tensors[n] for n in numbers))],
        None if attach_grad is None else lambda part, tensors: attach_grad(part, *(tensors[n] for n in numbers)),
    )


def _at(layout: Layout, tile: int) -> Layout:
    grid = Grid(layout.grid.sizes, tile)
    return layout_of(layout.shape, layout.cuts, grid)


def _read_boxes(d: Local | Reduced, count: int) -> list[Box | None]:
    """The box of each tensor argument that the rule's operation needs; None: the whole."""
    layout = base_layout(d)
    boxes: list[Box | None] = [None] * count
    for number, meta in enumerate(d.reads):
        at = layout if d.layouts is None else d.layouts[number]
        if at is not None:
            boxes[meta.number] = broadcast_box(at.shape, meta.shape, at.box)
    return boxes


# ---------------------------------------------------------------------------------------------- local and reduced rules


@dataclass(frozen=True)
class _Link:
    """How an axis of the grid cuts a tensor: on `dim`, by `ratio` pixels per pixel of the first tensor, or by a window."""

    dim: int
    ratio: Fraction
    reach: Any = None

    def to_base(self, interval: Interval) -> Interval:
        if self.reach is not None:
            return self.reach.input_read_by(interval)
        if len(interval) == 0:
            return Interval(0, 0)
        return Interval(int(interval.start / self.ratio), -int(-interval.stop // self.ratio))

    def from_base(self, interval: Interval) -> Interval:
        return Interval(int(interval.start * self.ratio), int(interval.stop * self.ratio))


class Boxed:
    """A Local or Reduced rule, which is asked anew for the box of every tile.

    reads[n][axis], outs[n][axis]: how the axis cuts argument or result n, relative to the first tensor that it cuts.
    extents[axis]: the pixels of that tensor.
    """

    def __init__(self, node: Node, layouts: list[Layout | None], layout: Layout, out_layouts: list[Layout | None]) -> None:
        self.node, self.layouts, self.layout, self.out_layouts = node, layouts, layout, out_layouts
        self.extents: dict[int, int] = {}
        self.units: dict[int, int] = {}
        self.reads: list[dict[int, _Link]] = []
        self.outs: list[dict[int, _Link]] = []

    @classmethod
    def of(cls, node: Node, layouts: list[Layout | None], d: Local | Reduced) -> Boxed | None:
        """None if the rule moves a cut, or if results are not cut in proportion to what is read."""
        layout = base_layout(d)
        if (
            isinstance(d, Local)
            and d.layouts is None
            and any(layout.cuts[dim % max(1, len(layout.shape))] is not None for dim in d.whole)
        ):
            return None
        for number, meta in enumerate(d.reads):
            at = layout if d.layouts is None else d.layouts[number]
            if meta.layout is not None and d.layouts is not None and at is not meta.layout:
                return None
        unread = {n for n, lay in enumerate(layouts) if lay is not None} - {meta.number for meta in d.reads}
        if unread:
            return None
        made = cls(node, layouts, layout, _out_layouts(d, layout))
        return made if made._link(d) else None

    def _link(self, d: Local | Reduced) -> bool:
        base: dict[int, tuple[int, tuple[int, ...]]] = {}
        for tensor in [*self.layouts, *self.out_layouts]:
            links: dict[int, _Link] = {}
            for dim, cut in enumerate(tensor.cuts if tensor is not None else ()):
                if cut is None:
                    continue
                if len(cut.axes) != 1:
                    return False
                (axis,) = cut.axes
                extent, bounds = base.setdefault(axis, (tensor.shape[dim], cut.bounds))  # type: ignore[union-attr]
                reach = getattr(d, "reach", {}).get(dim) if len(self.reads) >= len(self.layouts) else None
                ratio = Fraction(tensor.shape[dim], max(1, extent))  # type: ignore[union-attr]
                if reach is None and (not ratio or any(b * ratio != c for b, c in zip(bounds, cut.bounds, strict=True))):
                    return False
                self.extents[axis] = extent
                self.units[axis] = max(self.units.get(axis, 1), ratio.denominator if reach is None else 1)
                links[axis] = _Link(dim, ratio, reach)
            (self.reads if len(self.reads) < len(self.layouts) else self.outs).append(links)
        return True

    def _intervals(self, needs: dict[int, Box]) -> dict[int, Interval]:
        """For each axis, the pixels of the first tensor that `needs` read."""
        wanted: dict[int, list[Interval]] = {axis: [] for axis in self.extents}
        for number, box in needs.items():
            for axis in self.extents:
                link = self.outs[number].get(axis)
                wanted[axis].append(link.to_base(box[link.dim]) if link is not None else Interval(0, self.extents[axis]))
        found = {}
        for axis, intervals in wanted.items():
            unit, around = self.units[axis], hull(intervals) & Interval(0, self.extents[axis])
            stop = min(self.extents[axis], -(-around.stop // unit) * unit)
            found[axis] = Interval(around.start // unit * unit, stop)
        return found

    def _description(self, intervals: dict[int, Interval]) -> Local | Reduced:
        grid = Grid((3,) * len(self.layout.grid.sizes), sum(3**n for n in range(len(self.layout.grid.sizes))))
        layouts = []
        for value, links, layout in zip(self.node.reads, self.reads, self.layouts, strict=True):
            cuts: list[Cut | None] = [None] * value.ndim
            for axis, link in links.items():
                at, extent = link.from_base(intervals[axis]), value.shape[link.dim]
                cuts[link.dim] = Cut((axis,), (0, at.start, at.stop, extent))
            layouts.append(None if layout is None else layout_of(value.shape, tuple(cuts), grid))
        d = description_of(self.node, layouts)
        assert isinstance(d, (Local, Reduced)), f"{self.node.op} gave {d!r} for {intervals}"
        return d

    def step(self, needs: dict[int, Box]) -> TileOp:
        """The operation that makes the boxes in `needs`, by result number."""
        d = self._description(self._intervals(needs))
        layout = base_layout(d)
        numbers = [meta.number for meta in d.reads]

        def call(tensors: list[Tensor]) -> list[Any]:
            if isinstance(d, Local):
                return results(d.run(layout, *tensors))
            part = d.local(*(tensors[n] for n in numbers))
            total = d.merge(part.unsqueeze(0)) if d.merge is not None else part
            return results(d.finish(total, *tensors) if d.finish is not None else total)

        return TileOp(_read_boxes(d, len(self.node.reads)), self._boxes(d, layout), call)

    def finish_step(self, needs: dict[int, Box]) -> TileOp:
        """The end of a reduction on one tile; its first tensor is the total."""
        d = self._description(self._intervals(needs))
        assert isinstance(d, Reduced) and d.finish is not None
        layout = base_layout(d)
        finish = d.finish
        return TileOp(
            [None, *_read_boxes(d, len(self.node.reads))],
            self._boxes(d, layout),
            lambda tensors: results(finish(tensors[0], *tensors[1:])),
        )

    def reduced_outputs(self, tensors: list[Tensor]) -> list[Any]:
        """The results of a reduction that are not cut, from the total; the arguments have no pixels."""
        total, *given = tensors
        return self._without_pixels(given, total)

    def uncut_outputs(self, tensors: list[Tensor]) -> list[Any]:
        """The results that are not cut of a rule that reduces no cut dim."""
        return self._without_pixels(tensors, None)

    def _without_pixels(self, given: list[Tensor], total: Tensor | None) -> list[Any]:
        d = self._description(dict.fromkeys(self.extents, Interval(0, 0)))
        assert isinstance(d, Reduced)
        for number, (layout, box) in enumerate(zip(self.layouts, _read_boxes(d, len(given)), strict=True)):
            if layout is None and box is not None:
                given[number] = given[number][tuple(slice(i.start, i.stop) for i in box)]
        if total is None:
            total = d.local(*(given[meta.number] for meta in d.reads))
        return results(d.finish(total, *given) if d.finish is not None else total)

    def _boxes(self, d: Local | Reduced, layout: Any) -> list[Box | None]:
        return [None if out is None else out.box for out in _out_layouts(d, layout)]


def _out_layouts(d: Local | Reduced, layout: Layout) -> list[Layout | None]:
    if isinstance(d, Local):
        return [layout_of(tuple(shape), cuts or (None,) * len(shape), layout.grid) for shape, cuts in d.outs(layout)]
    return [
        layout_of(out.shape, layout.cuts if out.cuts is None else out.cuts, layout.grid) if isinstance(out, Tile) else None
        for out in d.outs
    ]
