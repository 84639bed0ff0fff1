"""A layout's PlanEstimate: its ranks emulated, their memory and time priced on a cluster.  Records are kept and used again."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from widefield.config import RunConfig
from widefield.planner.cost import device_memory, step_time
from widefield.planner.emulation import CannotEmulate, emulated_step
from widefield.planner.machines import Cluster
from widefield.planner.search.estimate import SAFETY, PlanEstimate, RankMemory, Stretch
from widefield.planner.search.layouts import RunLayout
from widefield.planner.search.worlds import RankClass, at_true_size, classes_of, small_world
from widefield.planner.step_record import StepRecord
from widefield.plans import check
from widefield.training.given import NOTHING, Given

MOST_POINTS = 240
"""Of a curve of memory that is shown."""
MOST_SPANS = 400


class Emulate(Protocol):
    """As emulation.emulated_step."""

    def __call__(
        self, config: RunConfig, *, ranks: int, rank: int = 0, given: Given = NOTHING, on_cpu: bool = True
    ) -> StepRecord: ...


@dataclass
class EmulationCount:
    """How many ranks were emulated, and how long that took."""

    emulations: int = 0
    seconds: float = 0.0


@dataclass
class Pricing:
    """Makes estimates for one model and its images on a cluster.

    config: the recipe.  given: objects in place of what it names, such as stand-in data.
    measure: gets the records of a layout before its time is reckoned, to time their kernels on this machine; None: no.
    emulate, memory_of, time_of: replaced in tests.
    A copy with another cluster or batch shares what was emulated, and the tally.
    """

    config: RunConfig
    cluster: Cluster
    given: Given = NOTHING
    measure: Callable[[Sequence[StepRecord]], None] | None = None
    emulate: Emulate = emulated_step
    memory_of: Callable[..., Any] = device_memory
    time_of: Callable[..., Any] = step_time
    tally: EmulationCount = field(default_factory=EmulationCount)
    _records: dict[Any, StepRecord] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.config.data.batch

    def with_batch(self, batch: int) -> Pricing:
        return replace(self, config=self.config.model_copy(
            update={"data": self.config.data.model_copy(update={"batch_size": batch})}
        ))  # fmt: skip

    def record(self, layout: RunLayout, rank: int = 0, *, batch: int | None = None) -> StepRecord:
        """The emulated step of a rank, at its true size.

        ValueError, NotImplementedError: refused.  CannotEmulate: the model needs numbers.
        """
        world = small_world(layout, batch or self.batch)
        key = (world.small, world.batch, rank)
        if key not in self._records:
            config = world.small.config(self.config, batch=world.batch)
            if config.precision == "tf32":  # float32 in all but the time of products, and a mode of GPUs
                config = config.model_copy(update={"precision": "float32"})
            check(world.small.plan(config), ranks=world.small.ranks, samples_per_step=world.batch)
            started = time.perf_counter()
            try:
                self._records[key] = self.emulate(
                    config, ranks=world.small.ranks, rank=rank, given=self.given, on_cpu=self.cluster.device.is_cpu
                )
            finally:
                self.tally.emulations += 1
                self.tally.seconds += time.perf_counter() - started
        return at_true_size(self._records[key], world)

    def refusal(self, layout: RunLayout) -> str | None:
        """Why no model can run under this layout, whatever it is; None where one may."""
        try:
            check(layout.plan(self.config), ranks=layout.ranks, samples_per_step=self.batch)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None

    def estimate(self, layout: RunLayout, *, corners: bool = False) -> PlanEstimate:
        """The PlanEstimate of a layout; a refused one has the strategies' reason.

        corners: emulate also ranks that hold less.  CannotEmulate: the model cannot be emulated under any plan.
        """
        try:
            check(layout.plan(self.config), ranks=layout.ranks, samples_per_step=self.batch)
            classes = classes_of(layout, corners=corners)
            records = [self.record(layout, one.rank) for one in classes]
        except CannotEmulate:
            raise
        except (ValueError, NotImplementedError) as error:
            return PlanEstimate(layout, layout.plan(self.config), "refused", str(error))
        except Exception as error:  # one plan without a price is better than none with one
            why = f"its step could not be emulated, which is an error of the planner ({type(error).__name__}: {error})"
            return PlanEstimate(layout, layout.plan(self.config), "refused", why)
        try:
            return self._priced(layout, classes, records)
        except AssertionError as error:
            why = f"its ranks' messages could not be put together, which is an error of the planner: {error}"
            return PlanEstimate(layout, layout.plan(self.config), "refused", why)

    def _priced(self, layout: RunLayout, classes: Sequence[RankClass], records: Sequence[StepRecord]) -> PlanEstimate:
        memory = tuple(self._memory(one, record) for one, record in zip(classes, records, strict=True))
        if self.measure is not None:
            self.measure(records)
        found = self.time_of(records, self.cluster, precision=self.config.precision)
        assumed = [text for one in (*records, *memory) for text in one.assumed]
        largest = max(records, key=lambda record: sum(message.bytes for message in record.messages))
        limit = self.cluster.device.memory_bytes
        fits = math.ceil(SAFETY * max(rank.total_bytes for rank in memory)) <= limit
        return PlanEstimate(
            layout, layout.plan(self.config), "fits" if fits else "too large", "", memory, limit, found.seconds,
            found.low_seconds, found.high_seconds, dict(found.parts), self.batch / found.seconds,
            messages=_messages_of(largest), flops=max(record.flops for record in records),
            extrapolated=tuple(found.extrapolated), assumed=tuple(dict.fromkeys(assumed)),
            timeline=_stretches(found.spans),
        )  # fmt: skip

    def _memory(self, one: RankClass, record: StepRecord) -> RankMemory:
        found = self.memory_of(record, self.cluster)
        where = " ".join(part for part in (record.peak_op, record.peak_module and f"in {record.peak_module}") if part)
        parts = {str(name): size for name, size in record.parts.items() if size}
        return RankMemory(
            one.rank, one.role, one.ranks, found.allocated, found.reserved, found.total, parts, where, _curve(record),
            tuple(found.assumed),
        )  # fmt: skip

    def one_device(self, samples: int) -> tuple[StepRecord, float] | None:
        """A step of so many samples on one device with endless memory, and its seconds; None where that is refused."""
        try:
            record = self.record(RunLayout(), batch=samples)
        except CannotEmulate:
            raise
        except (ValueError, NotImplementedError):
            return None
        if self.measure is not None:
            self.measure([record])
        return record, self.time_of([record], self.cluster, precision=self.config.precision).seconds


def _messages_of(record: StepRecord) -> dict[str, tuple[int, int]]:
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for message in record.messages:
        if not message.control:
            number[message.kind] += 1
            size[message.kind] += message.bytes
    return {kind: (number[kind], size[kind]) for kind in number}


def _curve(record: StepRecord) -> tuple[tuple[int, int], ...]:
    """The memory over the step, by the largest point of each of MOST_POINTS runs of events."""
    points = [(point.event, point.bytes) for point in record.memory]
    width = -(-len(points) // MOST_POINTS) if points else 1
    return tuple(max(points[at : at + width], key=lambda point: point[1]) for at in range(0, len(points), width))


def _stretches(spans: Sequence[Any]) -> tuple[Stretch, ...]:
    """The longest MOST_SPANS of a timeline's spans, by rank and start."""
    longest = sorted(spans, key=lambda span: -span.seconds)[:MOST_SPANS]
    kept = sorted(longest, key=lambda span: (span.rank, span.start))
    return tuple(Stretch(span.rank, span.kind, span.name, span.phase, span.start, span.seconds) for span in kept)
