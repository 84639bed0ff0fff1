"""Which values should be stored between segments, so that halos end there, and which recomputed?  A search by estimates.

Two greedy paths start from the program that stores what it must: along one each program stores one value more, along the other
one less.  The paths do not depend on the memory budget, which only decides how far along a path to go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from widefield.capture.ir import Value
from widefield.streaming.cost_model import Estimate, Estimator
from widefield.streaming.schedule import FusedRegion, PlanMemo, TileSchedule
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp

GAIN_LEAST = 0.005
"""The fraction of the time that one more stored value must save."""
STEPS_MOST = 16
"""The largest number of steps along a path."""


@dataclass(frozen=True)
class KeepPlan:
    """A program and the choices that it follows from: values that it stores (`cut`) or recomputes (`again`) without need.

    cost, together: as in `Estimate`.
    """

    program: TileSchedule
    estimator: Estimator
    cut: tuple[Value, ...] = ()
    again: tuple[Value, ...] = ()

    @cached_property
    def cost(self) -> float:
        return self.estimator.cost(self.program)

    @cached_property
    def together(self) -> int:
        return self.estimator.together(self.program)

    @cached_property
    def estimate(self) -> Estimate:
        return self.estimator.estimate(self.program)


class KeepSearch:
    """Programs of the same units that differ in what they store."""

    def __init__(self, memo: PlanMemo, estimator: Estimator) -> None:
        self.memo, self.estimator = memo, estimator
        self.base = self._plan((), ())

    def _plan(self, cut: tuple[Value, ...], again: tuple[Value, ...]) -> KeepPlan:
        return KeepPlan(self.memo.program(frozenset(cut), frozenset(again)), self.estimator, cut, again)

    def with_more(self, room: int | None) -> list[KeepPlan]:
        """Plans that each store one value more than the one before: that which saves the most time per byte.

        room: the bytes that stored values and their gradients may take; None: any.
        """

        def worth(before: KeepPlan, after: KeepPlan) -> float:
            if room is not None and after.together > room:
                return 0.0
            gain = before.cost - after.cost
            return gain / max(1, after.together - before.together) if gain >= GAIN_LEAST * before.cost else 0.0

        moves = list(dict.fromkeys(self._read_with_halo()))
        return self._path(moves, lambda plan, value: self._plan((*plan.cut, value), plan.again), worth)

    def with_less(self) -> list[KeepPlan]:
        """Plans that each recompute one value more than the one before: that which saves the most bytes per time."""

        def worth(before: KeepPlan, after: KeepPlan) -> float:
            return (before.estimate.peak - after.estimate.peak) / max(1.0, after.cost - before.cost)

        results, wide = set(self.memo.graph.results), {unit.reads[n] for unit in self.memo.units for n in unit.wide}
        moves = [value for value in self.base.program.kept if value not in results and value not in wide]
        return self._path(moves, lambda plan, value: self._plan(plan.cut, (*plan.again, value)), worth)

    def _path(
        self, moves: Iterable[Value], apply: Callable[[KeepPlan, Value], KeepPlan], worth: Callable[[KeepPlan, KeepPlan], float]
    ) -> list[KeepPlan]:
        """The plans along a greedy path.  Moves of no worth at the start are dropped; others are valued again when they come
        first in the queue."""
        here = self.base
        found: list[KeepPlan] = []
        queue: list[tuple[float, int, Value, KeepPlan, int]] = []
        for order, value in enumerate(moves):
            plan = apply(here, value)
            if worth(here, plan) > 0:
                queue.append((-worth(here, plan), order, value, plan, 0))
        heapq.heapify(queue)
        while queue and len(found) < STEPS_MOST:
            _, order, value, plan, at = heapq.heappop(queue)
            if at == len(found):
                here = plan
                found.append(plan)
                continue
            plan = apply(here, value)
            if worth(here, plan) > 0:
                heapq.heappush(queue, (-worth(here, plan), order, value, plan, len(found)))
        return found

    # ------------------------------------------------------------------------------------------ candidates

    def _read_with_halo(self) -> Iterator[Value]:
        """Candidates: values that are read with a halo, and single values through which a segment's computation passes.

        In place of each, the value that it was computed from pixel by pixel, if that takes no more memory.
        """
        for stage in self.base.program.stages:
            for segment in stage.segments:
                made = {out for unit in segment.units for out in unit.outs}
                for value in (*_with_halo(segment), *_joints(segment, self.memo)):
                    origin = self._origin(value, made)
                    if origin in made and origin not in segment.kept:
                        yield origin

    def _origin(self, value: Value, made: set) -> Value:
        """The value from which this one is computed pixel by pixel: if a convolution's result is stored, it runs only once."""
        while value in made:
            unit = self.memo.maker[value]
            before = [read for read in unit.reads if read in self.memo.layouts]
            if len(before) != 1 or not _is_pixelwise(unit, value, before[0]) or before[0] not in made:
                break
            (value,) = before
        return value


def _is_pixelwise(unit: TracedOp, value: Value, before: Value) -> bool:
    """Whether a unit computes each pixel from the same pixel of `before`, and `before` takes no more memory."""
    if unit.step is None or before.bytes > value.bytes or before.shape[2:] != value.shape[2:]:
        return False
    return unit.is_pointwise or "norm" in str(unit.node.op)


def _with_halo(segment: FusedRegion) -> list[Value]:
    """Values of which a step reads a larger fraction than it makes of its result."""
    found = []
    for unit, step in _largest(segment):
        for value, box in zip(unit.reads, step.reads, strict=True):
            out = unit.outs[0]
            if box is None or out is None or step.outs[0] is None or len(box) != len(step.outs[0]):
                continue
            pairs = zip(box, value.shape, step.outs[0], out.shape, strict=True)
            if any(len(read) * count >= len(made) * extent + count for read, extent, made, count in list(pairs)[2:]):
                found.append(value)
    return found


def _largest(segment: FusedRegion) -> list[tuple[TracedOp, TileOp]]:
    """The steps of the sampled tile that reads the most."""
    tiles = [segment.tiles[place].steps for place, _ in segment.samples]
    return max(tiles, key=lambda steps: sum(len(i) for _, step in steps for box in step.reads if box for i in box), default=[])


def _joints(segment: FusedRegion, memo: PlanMemo) -> list[Value]:
    """Values after which nothing computed before is read any more."""
    last = {value: n for n, unit in enumerate(segment.units) for value in unit.reads}
    last.update(dict.fromkeys(segment.kept, len(segment.units)))
    last.update({value: len(segment.units) for unit in segment.parts for value in unit.reads})
    found: list[Value] = []
    live: set[Value] = set()
    for n, unit in enumerate(segment.units):
        live |= {value for value in (*unit.reads, *unit.outs) if value in memo.layouts and last.get(value, -1) > n}
        live = {value for value in live if last[value] > n}
        found += list(live) if len(live) == 1 else []
    return found
