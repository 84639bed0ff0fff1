"""Which plan?  Tries the layouts that may win, of every family the cheapest first, until the time is spent.

A family is a set of axes with a way of keeping activations; its layouts differ in sizes.  Where a layout does not fit, the next
of its family that holds less is tried, and then the same with recompute and in tiles in time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from widefield.planner.search.bounds import ModelBytes, least_bytes, model_bytes, relative_time
from widefield.planner.search.estimate import PlanEstimate, fastest_first
from widefield.planner.search.layouts import RunLayout, layout_of, layouts, with_less_memory
from widefield.planner.search.pricing import Pricing
from widefield.planner.step_record import StepRecord

SECONDS = 30.0
"""For the emulations of one search, where the caller names no other time."""
FITS_A_FAMILY = 2
TRIES_A_FAMILY = 5
HOPELESS = 2.0
"""Times the rough time of the best plan, beyond which nothing is tried: rough times are not wrong by so much."""
MIXED, LATER = 1.1, 1.3
"""By how much later mixtures of axes are tried than single ones, and a family in which one layout fits than others."""
FINALISTS = 3
"""Of which ranks in corners are emulated too."""


@dataclass
class SearchResult:
    """Everything that a search has tried.

    estimates: in the order in which they were tried, the plain copies first.  left_out: by the least
    that they hold, in bytes.  slower: how many were left out since they are sure to take longer.  untried: for want of time.
    impossible: by family, a layout that no strategy can carry out for any model, and why.
    one: the step of one device with endless memory, of one device's share of the batch; None where it cannot be emulated.
    """

    ranks: int
    estimates: list[PlanEstimate] = field(default_factory=list)
    impossible: dict[tuple[object, ...], tuple[RunLayout, str]] = field(default_factory=dict)
    left_out: list[tuple[RunLayout, float]] = field(default_factory=list)
    one: StepRecord | None = None
    slower: int = 0
    untried: int = 0

    @property
    def ranking(self) -> list[PlanEstimate]:
        return fastest_first(self.estimates)

    @property
    def best(self) -> PlanEstimate | None:
        return next(iter(self.ranking), None)

    @property
    def nearest(self) -> PlanEstimate | None:
        """Of those that do not fit, the one that lacks least; None where none could be emulated."""
        too_large = [estimate for estimate in self.estimates if estimate.state == "too large"]
        return min(too_large, key=lambda estimate: (estimate.missing_bytes, estimate.seconds), default=None)


def search(
    pricing: Pricing,
    ranks: int,
    pixels: tuple[int, ...],
    *,
    seconds: float = SECONDS,
    own: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Estimates of the layouts of `ranks` ranks that may win.

    pixels: of an image.  seconds: after which no further layout is emulated.  own: try the recipe's own layout too.
    say: hears of each estimate.
    ValueError: no layout has a sample for every copy.  CannotEmulate: the model cannot be emulated.
    """
    clock, found = _Clock(), SearchResult(ranks)
    samples = max(1, -(-pricing.batch // ranks))
    one = pricing.one_device(samples) or pricing.one_device(2 * samples)
    model = None if one is None else model_bytes(one[0])
    found.one = None if one is None else one[0]
    first = _first(pricing, ranks, own=own)
    queue = _Queue(pricing, model, found, len(pixels))
    queue.add(_known(pricing, ranks, pixels, needed=not first))
    for layout in itertools.chain(first, queue):
        if clock.seconds > seconds and found.estimates and layout not in first:
            found.untried = len(queue.waiting)
            break
        if any(estimate.layout == layout for estimate in found.estimates):
            continue
        estimate = _with_efficiency(pricing.estimate(layout), one, pricing.batch)
        found.estimates.append(estimate)
        queue.learn(estimate)
        say(line(estimate))
    _look_closer(pricing, found, one)
    return found


def _known(pricing: Pricing, ranks: int, pixels: tuple[int, ...], *, needed: bool) -> list[RunLayout]:
    """The plain layouts.  ValueError: there are none, though one is needed."""
    known = layouts(
        ranks, pixels=pixels, batch=pricing.batch, accumulate=pricing.config.gradient.accumulate,
        most_channels=min(8, pricing.cluster.devices_per_node),
    )  # fmt: skip
    if not known and needed:
        raise ValueError(
            f"no plan gives each of {ranks} ranks work: the batch has {pricing.batch} samples and images have "
            f"{' x '.join(map(str, pixels))} pixels; use a larger data.batch_size, or fewer ranks"
        )
    return known


def line(estimate: PlanEstimate) -> str:
    """As it is printed when it has been made."""
    if estimate.state == "refused":
        return f"{estimate.name}: refused: {estimate.reason}"
    memory = f"{estimate.peak_memory_bytes / 2**30:.2f} GiB of {estimate.memory_bytes / 2**30:.0f}"
    return f"{estimate.name}: {estimate.state}, {memory}, {1e3 * estimate.seconds:.1f} ms a step"


def _first(pricing: Pricing, ranks: int, *, own: bool) -> list[RunLayout]:
    """What is tried in any case: copies alone, and the recipe's own layout."""
    copies = [RunLayout(replicate=ranks)] if ranks * pricing.config.gradient.accumulate <= pricing.batch else []
    if not own:
        return copies
    asked = layout_of(pricing.config, ranks)
    possible = asked.ranks == ranks and asked.copies <= pricing.batch and asked not in copies
    return [*copies, *([asked] if possible else [])]


class _Clock:
    """The seconds of this process's own work since it was made: a busy machine changes no choice; at least a third of all."""

    def __init__(self) -> None:
        self._work, self._all = time.process_time(), time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.process_time() - self._work, (time.monotonic() - self._all) / 3)


@dataclass
class _Queue:
    """The layouts that are still to be tried, the likely winners first; iterating takes them out."""

    pricing: Pricing
    model: ModelBytes | None
    found: SearchResult
    dims: int
    waiting: list[tuple[float, int, RunLayout]] = field(default_factory=list)
    tried: dict[tuple[object, ...], list[PlanEstimate]] = field(default_factory=dict)
    seen: set[RunLayout] = field(default_factory=set)
    second: set[RunLayout] = field(default_factory=set)
    best_order: float = math.inf
    _numbers: itertools.count = field(default_factory=itertools.count)

    def add(self, known: list[RunLayout]) -> None:
        batch, cluster = self.pricing.batch, self.pricing.cluster
        for layout in known:
            if layout in self.seen:
                continue
            self.seen.add(layout)
            least = 0.0 if self.model is None else least_bytes(layout, self.model, batch)
            if least > cluster.device.memory_bytes:
                self.found.left_out.append((layout, least))
                self.add([] if layout.stream else with_less_memory(layout, self.dims))
                continue
            order = relative_time(layout, batch, cluster.devices_per_node) * MIXED ** max(0, layout.choices - 1)
            heapq.heappush(self.waiting, (order, next(self._numbers), layout))

    def __iter__(self) -> _Queue:
        return self

    def __next__(self) -> RunLayout:
        while self.waiting:
            order, _, layout = heapq.heappop(self.waiting)
            if (why := self.pricing.refusal(layout)) is not None:
                self.found.impossible.setdefault(layout.family, (layout, why))
            elif order > HOPELESS * self.best_order:
                self.found.slower += 1
            elif layout not in self.second and any(one.state == "fits" for one in self.tried.get(layout.family, [])):
                self.second.add(layout)  # other families first
                heapq.heappush(self.waiting, (LATER * order, next(self._numbers), layout))
            elif not self._is_enough(layout):
                return layout
        raise StopIteration

    def learn(self, estimate: PlanEstimate) -> None:
        """Note an estimate; where it does not fit, what holds less is tried too."""
        self.tried.setdefault(estimate.layout.family, []).append(estimate)
        if estimate.state == "fits":
            order = relative_time(estimate.layout, self.pricing.batch, self.pricing.cluster.devices_per_node)
            self.best_order = min(self.best_order, order)
        if estimate.state == "too large":
            self.add(with_less_memory(estimate.layout, self.dims))

    def _is_enough(self, layout: RunLayout) -> bool:
        """Whether the family of a layout has been tried enough, or one of it that holds more memory was refused twice."""
        before = self.tried.get(layout.family, [])
        fit = sum(estimate.state == "fits" for estimate in before)
        refused = sum(estimate.state == "refused" for estimate in before)
        return fit >= FITS_A_FAMILY or len(before) >= TRIES_A_FAMILY or refused >= 2


def _with_efficiency(estimate: PlanEstimate, one: tuple[StepRecord, float] | None, batch: int) -> PlanEstimate:
    """The estimate with its efficiency: one device's time for all samples, over that of all devices."""
    if one is None or not estimate.seconds:
        return estimate
    ideal = one[1] / max(1, one[0].samples) * batch
    return replace(estimate, efficiency=ideal / (estimate.layout.ranks * estimate.seconds))


def _look_closer(pricing: Pricing, found: SearchResult, one: tuple[StepRecord, float] | None) -> None:
    """Of the best few, emulate the ranks in corners too, which hold less but may take longer."""
    for estimate in found.ranking[:FINALISTS]:
        if any(size > 2 for size in estimate.layout.space):
            place = found.estimates.index(estimate)
            found.estimates[place] = _with_efficiency(pricing.estimate(estimate.layout, corners=True), one, pricing.batch)
