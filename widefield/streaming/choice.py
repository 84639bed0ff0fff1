"""Chooses the number of tiles, what is stored between segments, and where; by arithmetic, with the reasons in words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from widefield.capture.ir import Graph, Value
from widefield.fallback import Fallback, in_words
from widefield.quantity import bytes_text
from widefield.streaming.cost_model import Estimate, Estimator, Setting, device_of
from widefield.streaming.fallbacks import fallbacks_of
from widefield.streaming.saved_tensors import SavedTensorCache
from widefield.streaming.schedule import PlanMemo, TileSchedule, program_of
from widefield.streaming.search import KeepPlan, KeepSearch
from widefield.streaming.tile_planner import TracedOps

TILE_LEAST = 32
"""The least pixels along each dim of a tile whose size is chosen here."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tiles along the longest dim that are tried."""
HOPELESS = 3
"""A program that takes more than this times the budget is not improved by storing more or less."""


@dataclass
class Choice:
    """program: what to run, in `tiles`.  place: where tensors are stored, but for `room` bytes, which fit on the device.

    reasons: sentences for users.  fallbacks: the operations that do not run in these tiles; the reasons name them too.
    """

    program: TileSchedule
    tiles: tuple[int, ...]
    place: str
    estimate: Estimate
    room: int = 0
    reasons: list[str] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


def choose(
    graph: Graph,
    *,
    tiles: tuple[int, ...] | None,
    budget: int | None,
    place: str | None,
    fixed: int,
    trains: bool,
    read: Callable[[tuple[int, ...]], TracedOps],
    extents: Sequence[int] | None = None,
    by_windows: Collection[int] = (),
    ranks: int = 1,
) -> Choice:
    """Choose what to run for a graph.

    tiles: the number along each image dim; None: as few as fit `budget`, the bytes that a step may take on the device.
    place: where tensors are stored; None: on the device if they fit, else in the host's memory, else in a file.
    fixed: bytes of other tensors on the device, such as weights and their gradients.  trains: whether a backward follows.
    read(tiles): plans the graph's operations for so many tiles.  extents: of the image dims on one rank, in pixels.
    by_windows: the indices of inputs that are a WindowedImage, and so not in memory.  ranks: the number that share the image.
    ValueError: nothing fits; the text says what the least would be and of what it consists.
    """
    if tiles is None and budget is None:
        raise ValueError(
            "neither tiles nor a budget of memory is given; say into how many tiles, as (4, 4), or how much memory, as 6GiB"
        )
    inputs = frozenset(graph.inputs[number] for number in by_windows)
    setting = Setting(trains, place or "device", fixed, inputs, ranks)
    search = _Search(graph, read, setting, budget, _places(graph, place, budget))
    grids = [tiles] if tiles is not None else list(grids_of(extents or extents_of(graph)))
    grid, where, plan, units = search.first(grids)
    program = program_of(graph, units, frozenset(plan.cut), frozenset(plan.again))
    room = 0 if where == "device" or budget is None else max(0, budget - plan.estimate.peak)
    reasons, fallbacks = reasons_of(program, grid, where, plan, room), fallbacks_of(units)
    return Choice(program, grid, where, plan.estimate, room, [*reasons, *in_words(fallbacks)], fallbacks)


def _places(graph: Graph, place: str | None, budget: int | None) -> list[str]:
    if place is not None:
        return [place]
    if budget is None:
        return ["device"]
    return ["device", "host", "file"] if device_of(graph) != "cpu" else ["device", "file"]


def extents_of(graph: Graph) -> tuple[int, ...]:
    """The extents of the image dims of the largest input, without batch and channels."""
    image = max(graph.inputs, key=lambda value: (value.ndim > 2, value.bytes), default=None)
    return image.shape[2:] if image is not None and image.ndim > 2 else (1,)


def grids_of(extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of tiles per dim, in growing order: tiles are nearly square, and at least 32 px long.

    >>> list(grids_of((100, 300)))
    [(1, 1), (1, 2), (1, 3), (1, 4), (2, 6), (3, 8)]
    """
    seen = set()
    for count in COUNTS:
        side = max(extents) / count
        grid = tuple(max(1, min(round(extent / side), extent // TILE_LEAST)) for extent in extents)
        if grid not in seen and (count == 1 or side >= TILE_LEAST):
            seen.add(grid)
            yield grid


Found = tuple[tuple[int, ...], str, KeepPlan, TracedOps]


@dataclass
class _Search:
    """least: of all plans tried, the estimate with the smallest peak, with its tiles and place.

    floor: of all plans tried, the estimate with the smallest `rest`.
    """

    graph: Graph
    read: Callable[[tuple[int, ...]], TracedOps]
    setting: Setting
    budget: int | None
    places: Sequence[str]
    cache: SavedTensorCache = field(default_factory=SavedTensorCache)
    least: tuple[Estimate, tuple[int, ...], str] | None = None
    floor: Estimate | None = None

    def first(self, grids: Sequence[tuple[int, ...]]) -> Found:
        """The fastest plan with the coarsest tiles that fit, or tiles up to twice as fine.  ValueError: nothing fits."""
        found: list[Found] = []
        for grid in grids:
            if found and max(grid) > 2 * max(found[0][0]):
                break
            fitting = self._in(grid)
            if self.budget is not None and self.floor is not None and self.floor.rest > self.budget:
                raise ValueError(_leaves_nothing(self.floor, self.budget))
            found += [fitting] if fitting is not None else []
        if not found:
            assert self.least is not None and self.budget is not None
            raise ValueError(_nothing_fits(*self.least, self.budget))
        return min(found, key=lambda one: one[2].cost)

    def _in(self, grid: tuple[int, ...]) -> Found | None:
        """The fastest plan with these tiles, in the first place where one fits; None if none does."""
        units = self.read(grid)
        memo = PlanMemo(self.graph, units)
        for place in self.places:
            keep_search = KeepSearch(memo, Estimator(self.graph, replace(self.setting, place=place), self.cache))
            plan = self._best(keep_search, grid, place)
            if plan is not None:
                return grid, place, plan, units
        return None

    def _best(self, keep_search: KeepSearch, grid: tuple[int, ...], place: str) -> KeepPlan | None:
        if self.budget is None:
            room = keep_search.base.together + keep_search.base.estimate.work
            return min((keep_search.base, *keep_search.with_more(room)), key=lambda plan: plan.cost)
        peak = keep_search.base.estimate.peak
        if self.floor is None or keep_search.base.estimate.rest < self.floor.rest:
            self.floor = keep_search.base.estimate
        if keep_search.base.estimate.rest > self.budget:
            return None
        tried = [keep_search.base, *(keep_search.with_more(None) if peak <= HOPELESS * self.budget else [])]
        tried += keep_search.with_less() if self.budget < peak <= HOPELESS * self.budget else []
        for plan in tried:
            if self.least is None or plan.estimate.peak < self.least[0].peak:
                self.least = plan.estimate, grid, place
        fitting = [plan for plan in tried if plan.estimate.peak <= self.budget]
        return min(fitting, key=lambda plan: plan.cost, default=None)


# ---------------------------------------------------------------------------------------------- in words


def reasons_of(program: TileSchedule, tiles: tuple[int, ...], place: str, plan: KeepPlan, room: int = 0) -> list[str]:
    """What was chosen and what it takes, a sentence each."""
    found = plan.estimate
    parts = [f"{bytes_text(found.work)} one tile's work", _kept_text(program, place, found, room), _rest_text(found)]
    sentences = [
        f"{_times(tiles)} tiles{_tile_text(program, tiles)}: {bytes_text(found.peak)} at most, of which {', '.join(parts)}",
        f"predicted {found.slowdown:.2f} times the time of a run without tiles",
    ]
    sentences += [f"kept so that halos end there: {name_of(value)} ({bytes_text(value.bytes)})" for value in plan.cut]
    return sentences + [f"made again rather than kept: {name_of(value)} ({bytes_text(value.bytes)})" for value in plan.again]


def _tile_text(program: TileSchedule, tiles: tuple[int, ...]) -> str:
    inputs = [value for value in program.graph.inputs if value in program.layouts]
    if not inputs:
        return ""
    largest = program.layouts[max(inputs, key=lambda value: value.bytes)]
    return f" of {_times(largest.tile_shape[-len(tiles) :])} px"


def _kept_text(program: TileSchedule, place: str, found: Estimate, room: int) -> str:
    count = len(program.segments)
    if not found.together:
        return "nothing kept between segments"
    where = {"device": "on the device", "host": "in the host's memory", "file": "in a file"}[place]
    where += f" but for what fits in {bytes_text(room)} of the device" if room else ""
    return f"{bytes_text(found.together)} kept between {count} segments ({where})"


def _times(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))


def name_of(value: Value) -> str:
    """The submodule and operation that made a value, as `up.2's conv`; without a submodule, the operation and its shape."""
    maker = value.maker
    if maker is None:
        return f"{value.source} of {_times(value.shape)}"
    return f"{maker.path}'s {maker.name}" if maker.path else f"{maker.name} of {_times(value.shape)}"


def _rest_text(found: Estimate) -> str:
    return (
        f"{bytes_text(found.inputs)} inputs, {bytes_text(found.outputs)} outputs and what comes back for them, "
        f"{bytes_text(found.fixed + found.weights)} weights and their gradients"
    )


ADVICE = (
    "Give more memory, read the image by windows (widefield.from_reader), or put the loss inside of what is streamed, so that "
    "no output of the image's size is made."
)


def _leaves_nothing(found: Estimate, budget: int) -> str:
    return (
        f"nothing fits {bytes_text(budget)} in however many tiles: a step holds {bytes_text(found.rest)} all the time, "
        f"{_rest_text(found)}.  {ADVICE}"
    )


def _nothing_fits(found: Estimate, tiles: Sequence[int], place: str, budget: int) -> str:
    where = "between segments" if place == "device" else "elsewhere, which is not counted"
    kept = f"{bytes_text(found.together)} are kept {where}"
    return (
        f"nothing fits {bytes_text(budget)}: the least that a step takes is {bytes_text(found.peak)}, in {_times(tiles)} "
        f"tiles: {bytes_text(found.work)} one tile's work, {_rest_text(found)}; {kept}.  {ADVICE}"
    )
