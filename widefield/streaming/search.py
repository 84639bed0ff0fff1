"""Which values are worth keeping, so that halos end there, and which are cheaper made again?  A search by estimates.

Two paths lead away from a program that keeps what it must: along one more and more is kept, along the other less and less.
They do not depend on how much memory there is; that decides only how far along a path to go.
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
"""Share of the time that one more kept value must save."""
STEPS_MOST = 16
"""How far along a path the search goes."""


@dataclass(frozen=True)
class KeepPlan:
    """A program.  cut, again: what it keeps, and makes again, of its own accord.  cost, together: as in `Estimate`."""

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
    """The programs of the same units that differ in what they keep."""

    def __init__(self, memo: PlanMemo, estimator: Estimator) -> None:
        self.memo, self.estimator = memo, estimator
        self.base = self._plan((), ())

    def _plan(self, cut: tuple[Value, ...], again: tuple[Value, ...]) -> KeepPlan:
        return KeepPlan(self.memo.program(frozenset(cut), frozenset(again)), self.estimator, cut, again)

    def with_more(self, room: int | None) -> list[KeepPlan]:
        """Each keeps one more value than the one before: that which saves the most time per byte.  room: for what is kept."""

        def worth(before: KeepPlan, after: KeepPlan) -> float:
            if room is not None and after.together > room:
                return 0.0
            gain = before.cost - after.cost
            return gain / max(1, after.together - before.together) if gain >= GAIN_LEAST * before.cost else 0.0

        moves = list(dict.fromkeys(self._read_with_halo()))
        return self._path(moves, lambda plan, value: self._plan((*plan.cut, value), plan.again), worth)

    def with_less(self) -> list[KeepPlan]:
        """Each makes one more value again than the one before: that which spares the most bytes per time."""

        def worth(before: KeepPlan, after: KeepPlan) -> float:
            return (before.estimate.peak - after.estimate.peak) / max(1.0, after.cost - before.cost)

        results, wide = set(self.memo.graph.results), {unit.reads[n] for unit in self.memo.units for n in unit.wide}
        moves = [value for value in self.base.program.kept if value not in results and value not in wide]
        return self._path(moves, lambda plan, value: self._plan(plan.cut, (*plan.again, value)), worth)

    def _path(
        self, moves: Iterable[Value], apply: Callable[[KeepPlan, Value], KeepPlan], worth: Callable[[KeepPlan, KeepPlan], float]
    ) -> list[KeepPlan]:
        """Greedy.  What is worth nothing at first is left out; other moves are looked at again once they come first."""
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
        """What is read through windows with a halo, or where that came from without one, if that is not larger; and joints."""
        for stage in self.base.program.stages:
            for segment in stage.segments:
                made = {out for unit in segment.units for out in unit.outs}
                for value in (*_with_halo(segment), *_joints(segment, self.memo)):
                    origin = self._origin(value, made)
                    if origin in made and origin not in segment.kept:
                        yield origin

    def _origin(self, value: Value, made: set) -> Value:
        """The value of which this one is made pixel by pixel: a convolution's own result, if kept, spares its second run."""
        while value in made:
            unit = self.memo.maker[value]
            before = [read for read in unit.reads if read in self.memo.layouts]
            if len(before) != 1 or not _is_pixelwise(unit, value, before[0]) or before[0] not in made:
                break
            (value,) = before
        return value


def _is_pixelwise(unit: TracedOp, value: Value, before: Value) -> bool:
    """Whether a unit gives each pixel from the same one, of a value that takes no more memory."""
    if unit.step is None or before.bytes > value.bytes or before.shape[2:] != value.shape[2:]:
        return False
    return unit.is_pointwise or "norm" in str(unit.node.op)


def _with_halo(segment: FusedRegion) -> list[Value]:
    """Values of which some step reads more pixels than its share of the result has."""
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
    """The steps of the tile that has the most neighbours."""
    tiles = [segment.tiles[place].steps for place, _ in segment.samples]
    return max(tiles, key=lambda steps: sum(len(i) for _, step in steps for box in step.reads if box for i in box), default=[])


def _joints(segment: FusedRegion, memo: PlanMemo) -> list[Value]:
    """Values through which everything goes: once they are made, nothing that came before is read any more."""
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
