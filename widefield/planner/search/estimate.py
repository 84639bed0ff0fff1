"""What is known of a plan before it runs: the memory of its ranks, its time and messages, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from widefield.planner.search.layouts import RunLayout
from widefield.plans import Plan

State = Literal["fits", "too large", "refused"]
EQUAL = 0.01
"""By how much the times of two plans may differ and count as equal."""
SAFETY = 1.05
"""A plan fits where its predicted memory times this is there: predictions of peak memory are within 5 % of the truth."""


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of a class of ranks in a step, and where it is reached.

    rank: one of the class, `ranks` of which there are.  peak_memory_bytes: allocated by tensors.
    reserved_bytes: with what the allocator of a GPU keeps besides.  total_bytes: with the driver's and the libraries' own.
    parts: bytes at the peak by what they are for, see step_record.Part.  where: the module and operation.
    curve: (event, bytes) over the step, thinned.  assumed: what was estimated, in sentences.
    """

    rank: int
    role: str
    ranks: int
    peak_memory_bytes: int
    reserved_bytes: int
    total_bytes: int
    parts: dict[str, int]
    where: str
    curve: tuple[tuple[int, int], ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """Of a step's timeline: a rank computes, sends or waits (`kind`) from `start` for `seconds`."""

    rank: int
    kind: str
    name: str
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class PlanEstimate:
    """A plan with what it costs.

    memory_bytes: what each device has.  seconds, low_seconds, high_seconds: of a step, with the interval that they are in.
    seconds_by: the parts of a step.  efficiency: samples per second and device, against one device with endless memory.
    messages: of the rank with most, by kind: (number, bytes).  extrapolated: operations whose time nobody has measured.
    """

    layout: RunLayout
    plan: Plan
    state: State
    reason: str = ""
    memory: tuple[RankMemory, ...] = ()
    memory_bytes: int = 0
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    seconds_by: dict[str, float] = field(default_factory=dict)
    images_per_second: float = 0.0
    efficiency: float | None = None
    messages: dict[str, tuple[int, int]] = field(default_factory=dict)
    flops: float = 0.0
    extrapolated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    timeline: tuple[Stretch, ...] = ()

    @property
    def name(self) -> str:
        return str(self.layout)

    @property
    def fullest(self) -> RankMemory:
        """The class of ranks that holds most.  AssertionError: a refused plan, which has none."""
        assert self.memory, f"{self.name} was {self.state}: {self.reason}"
        return max(self.memory, key=lambda rank: rank.total_bytes)

    @property
    def peak_memory_bytes(self) -> int:
        """All that the fullest rank takes of its device."""
        return self.fullest.total_bytes

    @property
    def wanted_bytes(self) -> int:
        """The memory that a device must have for this plan."""
        return math.ceil(SAFETY * self.peak_memory_bytes)

    @property
    def missing_bytes(self) -> int:
        """How much more memory each device would need; 0 where it fits."""
        return max(0, self.wanted_bytes - self.memory_bytes)

    @property
    def message_bytes(self) -> int:
        return sum(size for _, size in self.messages.values())

    def to_tree(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts, which JSON can hold."""
        tree: dict[str, Any] = {
            "name": self.name, "kind": self.layout.kind, "state": self.state, "reason": self.reason,
            "plan": self.plan.model_dump(mode="json"),
            "overrides": list(self.layout.overrides()), "ranks": self.layout.ranks,
        }  # fmt: skip
        if not self.memory:
            return tree
        return tree | {
            "peak_memory_bytes": self.peak_memory_bytes, "memory_bytes": self.memory_bytes,
            "memory": [_rank_tree(rank) for rank in self.memory], "seconds": self.seconds,
            "seconds_low": self.low_seconds, "seconds_high": self.high_seconds, "seconds_by": dict(self.seconds_by),
            "images_per_second": self.images_per_second, "efficiency": self.efficiency, "flops": self.flops,
            "messages": {kind: {"number": number, "bytes": size} for kind, (number, size) in self.messages.items()},
            "message_bytes": self.message_bytes, "extrapolated": list(self.extrapolated), "assumed": list(self.assumed),
            "timeline": [list(astuple(stretch)) for stretch in self.timeline],
        }  # fmt: skip


def _rank_tree(rank: RankMemory) -> dict[str, Any]:
    return {
        "rank": rank.rank, "role": rank.role, "ranks": rank.ranks, "peak_memory_bytes": rank.peak_memory_bytes,
        "reserved_bytes": rank.reserved_bytes, "total_bytes": rank.total_bytes, "parts": dict(rank.parts), "where": rank.where,
        "curve": [list(point) for point in rank.curve],
    }  # fmt: skip


def best_of_kinds(estimates: list[PlanEstimate]) -> list[PlanEstimate]:
    """The first of each family, in their order."""
    first: dict[tuple[object, ...], PlanEstimate] = {}
    for estimate in estimates:
        first.setdefault(estimate.layout.family, estimate)
    return list(first.values())


def fastest_first(estimates: list[PlanEstimate]) -> list[PlanEstimate]:
    """Those that fit, the fastest first; of those that are as fast as the fastest, to within EQUAL, the simplest is first."""
    fitting = sorted((e for e in estimates if e.state == "fits"), key=lambda e: (e.seconds, e.peak_memory_bytes))
    if not fitting:
        return []
    equal = [estimate for estimate in fitting if estimate.seconds <= (1 + EQUAL) * fitting[0].seconds]
    first = min(equal, key=lambda estimate: estimate.layout.choices)
    return [first, *(estimate for estimate in fitting if estimate is not first)]
