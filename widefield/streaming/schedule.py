"""In which order units run, which values are stored between them, and which boxes each tile reads and makes.

Units are assigned to stages.  A reduction over all pixels that is computed in one stage is available in the next; so is a value
that is needed whole, or that is stored so that it is not recomputed.  A stage runs its units that run once, then its segments.
A segment is a set of units that run together, tile after tile, from stored values to stored values.  It recomputes what it
needs and what is not stored.  ("Kept" values are those stored between segments.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, overload

from widefield.capture.ir import Graph, Value
from widefield.geometry.box import Box, is_empty
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Grid, Layout
from widefield.streaming.sampling import TileSampling
from widefield.streaming.tile_ops import TileOp, union
from widefield.streaming.tile_planner import TracedOp, TracedOps


@dataclass
class StreamedTile:
    """One tile of a segment.  number: its place on the virtual grid.

    sources: the box that it reads of each kept value.  steps: what runs, in order.
    kept: the box that it makes of each value to keep.  parts: reductions, with the step that computes the tile's part.
    drop[n]: values that are not read after step n.
    """

    number: int
    sources: dict[Value, Box] = field(default_factory=dict)
    steps: list[tuple[TracedOp, TileOp]] = field(default_factory=list)
    kept: dict[Value, Box] = field(default_factory=dict)
    parts: list[tuple[TracedOp, TileOp]] = field(default_factory=list)
    drop: list[list[Value]] = field(default_factory=list)


STEPS_MOST = 1 << 16
"""The largest number of steps in a segment whose tiles are kept in memory; otherwise each is planned anew when it runs."""


class StreamedTiles(Sequence[StreamedTile]):
    """The tiles of a segment, planned when they are asked for.  numbers: their places on the virtual grid."""

    def __init__(self, numbers: Sequence[int], make: Callable[[int], StreamedTile], steps: int) -> None:
        self.numbers, self._make = tuple(numbers), make
        self._made: dict[int, StreamedTile] | None = {} if steps * len(self.numbers) <= STEPS_MOST else None

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> StreamedTile: ...

    @overload
    def __getitem__(self, place: slice) -> list[StreamedTile]: ...

    def __getitem__(self, place: int | slice) -> StreamedTile | list[StreamedTile]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        number = self.numbers[place]
        if self._made is None:
            return self._make(number)
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


@dataclass(eq=False)
class FusedRegion:
    """A segment: units that run together, tile after tile, from the kept values in `sources` to those in `kept` and to `parts`.

    samples: indices of a few tiles that represent all, with the number of tiles that each stands for; see TileSampling.
    """

    units: list[TracedOp]
    kept: list[Value]
    parts: list[TracedOp]
    sources: list[Value]
    tiles: Sequence[StreamedTile]
    samples: list[tuple[int, float]] = field(default_factory=list)

    @cached_property
    def reads(self) -> list[Value]:
        """All values that its units read, kept ones and others."""
        return list(dict.fromkeys(value for unit in (*self.units, *self.parts) for value in unit.reads))


@dataclass
class Stage:
    """once: units that run once, on the whole.  segments: units that run tile after tile, after these."""

    once: list[TracedOp] = field(default_factory=list)
    segments: list[FusedRegion] = field(default_factory=list)


@dataclass
class TileSchedule:
    """stages: what to run.  layouts: of the tiled values.  kept: the kept values, with the stage that makes each.

    last: the last stage that reads each value in the forward.
    asked: the sets of values along which second derivatives are known to be there; see second_gradients.py.
    """

    graph: Graph
    layouts: dict[Value, Layout]
    stages: list[Stage]
    kept: dict[Value, int]
    last: dict[Value, int]
    asked: set[frozenset[Value]] = field(default_factory=set)

    @cached_property
    def kept_bytes(self) -> int:
        return sum(value.bytes for value in self.kept)

    @cached_property
    def segments(self) -> list[FusedRegion]:
        return [segment for stage in self.stages for segment in stage.segments]

    @cached_property
    def read_again(self) -> list[Value]:
        """The results that later segments, and so the backward, read."""
        sources = {value for segment in self.segments for value in segment.sources}
        sources |= {value for stage in self.stages for unit in stage.once for value in unit.reads}
        return [value for value in self.graph.results if value in sources]


def program_of(graph: Graph, units: TracedOps, cut: Set[Value] = frozenset(), again: Set[Value] = frozenset()) -> TileSchedule:
    """Build the schedule of the units.

    cut: values to keep though they could be used in the same segment, so that halos end there.
    again: values to recompute in later stages, besides those that take few cheap operations.
    """
    return PlanMemo(graph, units, False).program(cut, again)


class PlanMemo:
    """Builds schedules of the same units that keep different values; equal segments are built once.

    remembers: whether equal steps of tiles are built once too, which takes memory.
    """

    def __init__(self, graph: Graph, units: TracedOps, remembers: bool = True) -> None:
        self.graph, self.units, self.layouts, self.remembers = graph, units.units, units.layouts, remembers
        self.maker = {out: unit for unit in self.units for out in unit.outs if out is not None}
        self.place = {unit: number for number, unit in enumerate(self.units)}
        self.grid = next((layout.grid for layout in self.layouts.values()), Grid(()))
        self.sampling = TileSampling(self.grid, self.layouts)
        self._segments: dict[tuple, FusedRegion] = {}
        self._steps: dict[tuple, TileOp] = {}

    def program(self, cut: Set[Value] = frozenset(), again: Set[Value] = frozenset()) -> TileSchedule:
        """The schedule for these choices; see `program_of`."""
        return _SchedulePlan(self, cut, again).program()

    def is_there(self, value: Value) -> bool:
        """Whether a value is whole before the segments of its stage run: inputs, and results of units that run once."""
        unit = self.maker.get(value)
        return unit is None or unit.call is not None

    # ------------------------------------------------------------------------------------------ segments

    def segment(
        self, units: Set[TracedOp], kept: Sequence[Value], parts: Sequence[TracedOp], sources: Set[Value]
    ) -> FusedRegion:
        """The segment of these units; the same object for equal arguments."""
        key = (frozenset(units), tuple(kept), tuple(parts), frozenset(sources))
        if key not in self._segments:
            ordered = sorted(units, key=self.place.__getitem__)
            numbers = self.sampling.tiles(kept, parts)
            make = partial(self._tile, ordered, tuple(kept), tuple(parts), frozenset(sources))
            tiles = StreamedTiles(numbers, make, len(ordered) + len(parts))
            first = sorted(sources, key=lambda value: value.number)
            self._segments[key] = FusedRegion(
                ordered, list(kept), list(parts), first, tiles, self.sampling.samples(numbers, kept, parts)
            )
        return self._segments[key]

    def _kept_box(self, value: Value, number: int) -> Box | None:
        """The box that a tile makes of a value to keep; None if another tile makes it."""
        layout = self.layouts[value]
        box = layout.box_of(number)
        return box if _is_first(self.grid, number, layout.axes) and not is_empty(box) else None

    # ------------------------------------------------------------------------------------------ tiles

    def _tile(
        self, units: Sequence[TracedOp], kept: Sequence[Value], parts: Sequence[TracedOp], stored: Set[Value], number: int
    ) -> StreamedTile:
        tile = StreamedTile(number)
        needs: dict[Value, list[Box]] = {}
        sources: dict[Value, list[Box]] = {}

        def want(step: TileOp, unit: TracedOp) -> None:
            for value, box in zip(unit.reads, step.reads, strict=True):
                if box is None:
                    box = tuple(Interval(0, extent) for extent in value.shape)
                if value in self.layouts and not is_empty(box):
                    (sources if value in stored else needs).setdefault(value, []).append(box)

        for value in kept:
            box = self._kept_box(value, number)
            if box is not None:
                tile.kept[value] = box
                needs.setdefault(value, []).append(box)
        for unit in parts:
            if _is_first(self.grid, number, unit.axes):
                step = self._step((unit, number), partial(_made, unit.part, number))
                tile.parts.append((unit, step))
                want(step, unit)
        for unit in reversed(units):
            wanted = {n: union(needs[out]) for n, out in enumerate(unit.outs) if out is not None and out in needs}
            wanted = {n: box for n, box in wanted.items() if not is_empty(box)}
            if wanted:
                step = self._step((unit, *wanted.items()), partial(_made, unit.step, wanted))
                tile.steps.append((unit, step))
                want(step, unit)
        tile.steps.reverse()
        tile.sources = {value: union(boxes) for value, boxes in sources.items()}
        tile.drop = _drops(tile)
        return tile

    def _step(self, key: tuple, make: Callable[[], TileOp]) -> TileOp:
        if not self.remembers:
            return make()
        if key not in self._steps:
            self._steps[key] = make()
        return self._steps[key]


AGAIN_MOST = 6
"""The largest number of pointwise operations for which a value is recomputed rather than kept."""


class _SchedulePlan:
    """Builds one schedule: assigns units to stages, and chooses the kept values."""

    def __init__(self, memo: PlanMemo, cut: Set[Value], again: Set[Value]) -> None:
        self.memo, self.units, self.layouts = memo, memo.units, memo.layouts
        self.cut, self.again = cut, again
        self.stage: dict[Value, int] = {}
        self.unit_stage: dict[TracedOp, int] = {}
        self.kept: dict[Value, int] = {}

    def program(self) -> TileSchedule:
        self._find_stages()
        self._find_kept()
        stages = [Stage() for _ in range(1 + max(self.unit_stage.values(), default=0))]
        for unit in self.units:
            if unit.call is not None:
                stages[self.unit_stage[unit]].once.append(unit)
        for number, stage in enumerate(stages):
            stage.segments = self._segments(number)
        return TileSchedule(self.memo.graph, self.layouts, stages, self.kept, _last_reads(stages))

    # ------------------------------------------------------------------------------------------ stages

    def _find_stages(self) -> None:
        drawn, maker = 0, self.memo.maker
        for unit in self.units:
            stage = 0
            for number, value in enumerate(unit.reads):
                if value not in maker or (unit.node.draws and value in self.layouts and number not in unit.wide):
                    continue
                later = not self.memo.is_there(value) and (number in unit.wide or value in self.cut)
                stage = max(stage, self.stage[value] + later)
            if unit.node.draws:
                stage = drawn = max(stage, drawn)
            self.unit_stage[unit] = stage
            for out in unit.outs:
                if out is not None:
                    self.stage[out] = stage + (unit.part is not None)

    # ------------------------------------------------------------------------------------------ what is kept

    def _find_kept(self) -> None:
        results = set(self.memo.graph.results)
        for unit in self.units:
            for out in unit.outs:
                if out is not None and out in self.layouts and unit.step is not None and (out in results or out in self.cut):
                    self.kept[out] = self.stage[out]
            for number in unit.wide:
                value = unit.reads[number]
                if not self.memo.is_there(value):
                    self.kept[value] = self.stage[value]
        for unit in self.units:
            for value in self._tiled_reads(unit):
                is_later = not self.memo.is_there(value) and self.stage[value] < self.unit_stage[unit]
                if is_later and value not in self.again and self._cost(value) > AGAIN_MOST:
                    self.kept[value] = self.stage[value]

    def _tiled_reads(self, unit: TracedOp) -> list[Value]:
        return [v for n, v in enumerate(unit.reads) if v in self.layouts and n not in unit.wide and unit.call is None]

    def _cost(self, value: Value) -> float:
        """The number of operations that compute a value from kept values; infinite if one of them is not cheap."""
        if self.memo.is_there(value) or value in self.kept:
            return 0
        unit = self.memo.maker[value]
        if not (unit.is_pointwise or unit.step is not None and unit.reads[0].name == "total"):
            return float("inf")
        return 1 + sum(self._cost(read) for read in unit.reads if read in self.layouts)

    # ------------------------------------------------------------------------------------------ segments

    def _segments(self, stage: int) -> list[FusedRegion]:
        goals: list[_Goal] = [
            _Goal(value, *self._closure([value], stage)) for value, made in self.kept.items() if made == stage
        ]
        sums = [unit for unit in self.units if unit.part is not None and self.unit_stage[unit] == stage]
        goals += [_Goal(unit, *self._closure(unit.reads, stage)) for unit in sums]
        found = []
        for group in _together(goals):
            kept = [goal.target for goal in group if isinstance(goal.target, Value)]
            parts = [goal.target for goal in group if isinstance(goal.target, TracedOp)]
            units = set().union(*(goal.units for goal in group))
            found.append(self.memo.segment(units, kept, parts, set().union(*(goal.sources for goal in group))))
        return found

    def _is_source(self, value: Value, stage: int) -> bool:
        return self.memo.is_there(value) or (value in self.kept and self.kept[value] < stage)

    def _closure(self, values: Iterable[Value], stage: int) -> tuple[set[TracedOp], set[Value]]:
        """The units that compute these values from values kept before the stage, and the kept values that they read."""
        found: set[TracedOp] = set()
        sources: set[Value] = set()
        stack = [value for value in values if value in self.layouts]
        while stack:
            value = stack.pop()
            if self._is_source(value, stage):
                sources.add(value)
            elif (unit := self.memo.maker[value]) not in found:
                found.add(unit)
                stack += [read for read in unit.reads if read in self.layouts]
        return found, sources


@dataclass
class _Goal:
    """A value or reduction to compute in a stage, the units that compute it, and the kept values that these read."""

    target: Value | TracedOp
    units: set[TracedOp]
    sources: set[Value]


def _made(make: Any, argument: Any) -> TileOp:
    assert make is not None, "a unit that cannot run in tiles is among those of a segment"
    return make(argument)


def _last_reads(stages: Sequence[Stage]) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for number, stage in enumerate(stages):
        for unit in stage.once:
            last.update(dict.fromkeys(unit.reads, number))
        for segment in stage.segments:
            last.update(dict.fromkeys((*segment.sources, *segment.reads), number))
    return last


def _is_first(grid: Grid, tile: int, axes: Collection[int]) -> bool:
    """Whether a tile has coordinate 0 on all axes but `axes`: of several tiles that would make the same, one does."""
    return all(at == 0 for axis, at in enumerate(grid.coordinate(tile)) if axis not in axes)


def _together(goals: Sequence[_Goal]) -> list[list[_Goal]]:
    """Goals in groups that share no unit."""
    groups: list[list[_Goal]] = []
    for goal in goals:
        joined = [group for group in groups if any(member.units & goal.units for member in group)]
        rest = [group for group in groups if group not in joined]
        groups = [*rest, [*(member for group in joined for member in group), goal]]
    return groups


def _drops(tile: StreamedTile) -> list[list[Value]]:
    """For each step, the values that no later step reads."""
    needed = set(tile.kept) | {v for unit, _ in tile.parts for v in unit.reads}
    drops: list[list[Value]] = []
    for unit, _ in reversed(tile.steps):
        here = {v for v in (*unit.reads, *unit.outs) if v is not None} - needed
        drops.append(list(here))
        needed |= here
    return drops[::-1]
