"""The passes of a step: a loader's batches, grouped into steps, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from widefield.data.loader import Batch, close


@dataclass(frozen=True)
class StepTimes:
    """The wall time of a step, and the part of it spent waiting for data."""

    seconds: float
    data_seconds: float


class Passes:
    """Groups a loader's batches into steps and measures the time spent waiting for them.

    passes: batches per step.  begins: called at the beginning of each step.
    """

    def __init__(self, batches: Iterator[Batch], passes: int, begins: Callable[[], None] | None = None) -> None:
        self._batches, self._passes, self._begins = batches, passes, begins
        self.in_step_since: float | None = None
        """The `time.perf_counter()` at the beginning of the current step; None between steps.  Other threads may read it."""
        self._waited, self._began = 0.0, time.perf_counter()

    def next(self) -> list[Batch]:
        """The batches of the next step."""
        if self._begins is not None:
            self._begins()
        self.in_step_since = start = time.perf_counter()
        group = [next(self._batches) for _ in range(self._passes)]
        self._waited = time.perf_counter() - start
        return group

    def lap(self) -> StepTimes:
        """The times since the last lap."""
        now = time.perf_counter()
        times = StepTimes(now - self._began, self._waited)
        self._began, self.in_step_since = now, None
        return times

    def close(self) -> None:
        """End the loader's worker processes."""
        close(self._batches)

    def restart(self, batches: Iterator[Batch]) -> None:
        """Go on with other batches."""
        self._batches = batches
        self.skip_lap()

    def skip_lap(self) -> None:
        """Exclude the time since the last lap (evaluation, a save) from the next one."""
        self._began = time.perf_counter()
