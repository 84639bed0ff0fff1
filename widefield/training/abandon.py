"""Stopping within seconds where a step takes long: the step is given up, and the run is as it was before it.

Where the step before took over SLOW_SECONDS, or there was none, the ranks ask between the passes of a step whether one of them
was asked to stop.  A run on one rank stops in the middle of a pass too, as between the tiles of a streamed image.  What a pass
changes is copied at the beginning of such a step and put back: buffers, as running statistics, and the states of generators.
Weights and the optimizer's state change at the end of a step only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from widefield.training.interrupt import Interrupt, StopNow
from widefield.training.loop import Learner
from widefield.training.state import load_random_state, random_state

SLOW_SECONDS = 5.0


class Abandonable:
    """The steps of a learner, one after another.  Every rank uses it in the same way.

    passes: of a step.
    """

    def __init__(self, learner: Learner, interrupt: Interrupt, *, passes: int) -> None:
        self._learner, self._interrupt, self._passes = learner, interrupt, passes
        self._is_slow = True
        self._before: dict[str, Any] | None = None
        learner.between_passes = self._ask
        learner.in_passes = self._in_passes

    def begin(self) -> None:
        """Copy what a pass changes, if the step may take long."""
        buffers = {name: buffer.clone() for name, buffer in self._learner.model.named_buffers()} if self._is_slow else {}
        self._before = {"buffers": buffers, "random": random_state()} if self._is_slow else None

    def end(self, seconds: float) -> None:
        """The step is done.  seconds: that it took on this rank; the next one is slow if it was on average."""
        mesh = self._learner.mesh
        if mesh.size > 1 and self._passes > 1:
            seconds = float(mesh.sum_(torch.tensor(seconds, dtype=torch.float64, device=mesh.device))) / mesh.size
        self.end_on_average(seconds)

    def end_on_average(self, seconds: float) -> None:
        """Steps are done that took so many seconds on average, the same number on every rank."""
        self._is_slow = seconds > SLOW_SECONDS

    def undo(self) -> None:
        """Put the learner back to where it was before the step."""
        assert self._before is not None, "only a step that may take long is given up"
        with torch.no_grad():
            for name, buffer in self._learner.model.named_buffers():
                buffer.copy_(self._before["buffers"][name])
        self._learner.optimizer.zero_grad(set_to_none=True)
        load_random_state(self._before["random"])

    def _ask(self) -> None:
        """StopNow, on every rank: one was asked to stop."""
        mesh = self._learner.mesh
        if self._is_slow and float(mesh.sum_(torch.tensor(float(self._interrupt.asked), device=mesh.device))):
            raise StopNow

    @contextmanager
    def _in_passes(self) -> Iterator[None]:
        """Inside, a signal ends the step at once, if this rank is the only one."""
        self._interrupt.raises = self._is_slow and self._learner.mesh.size == 1
        try:
            yield
        finally:
            self._interrupt.raises = False
