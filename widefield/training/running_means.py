"""Means over the samples of many steps that a task keeps, as of the lengths of a generator's paths.

The mean of a step is that of its whole batch: ranks add up what their samples have in the message that tells of the loss, so
all have the same.  It is in a buffer of the model, so that checkpoints, skipped steps and averages of weights have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from widefield.tiled.api import whole


def decays_of(task: Any) -> Mapping[str, float]:
    """How far a step moves each mean that the task keeps towards its own, by name; {} of most tasks."""
    return getattr(task, "running_means", {})


def register_means(model: nn.Module, task: Any, device: torch.device) -> None:
    """Give the model the means that the task keeps, 0 in the beginning.  ValueError: it has something of that name."""
    for name in decays_of(task):
        if hasattr(model, name):
            raise ValueError(f"the task keeps a mean '{name}' in the model, a {type(model).__name__}, which has one; rename it")
        model.register_buffer(name, torch.zeros((), dtype=torch.float64, device=device))


class RunningMeans:
    """Those of a turn.  A task reads them as they were before the step, and adds what its samples have."""

    def __init__(self, task: Any = None, model: nn.Module | None = None) -> None:
        self.decays, self._model = decays_of(task), model
        self.of_samples = True
        """Whether the pass that runs has samples, and is not a dummy batch."""
        self._sums: dict[str, Tensor] = {}
        self._of_step: dict[str, float] = {}

    def value(self, name: str) -> Tensor:
        """A number in float64."""
        return getattr(self._model, name)

    def add(self, name: str, values: Tensor) -> None:
        """values: (B,) of the samples of a pass, on every rank that shares them."""
        total = whole(values.detach().double().sum()) * float(self.of_samples)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def sums(self, like: Tensor) -> Tensor:
        """(M,) of the passes so far, 0 of what was not added to; as `like`."""
        found = like.new_zeros(len(self.decays))
        for number, name in enumerate(self.decays):
            if name in self._sums:
                found[number] += self._sums[name].to(like)
        return found

    def set_sums_of_step(self, sums: Sequence[float], count: float) -> None:
        """sums: of all samples, as `sums`.  count: how many these are."""
        named = zip(self.decays, sums, strict=True)
        self._of_step = {name: value / count for name, value in named if name in self._sums and count}

    @torch.no_grad()
    def update(self) -> None:
        """Move each mean that was added to towards the one of the step."""
        for name, mean in self._of_step.items():
            buffer = self.value(name)
            buffer.add_(mean - buffer, alpha=self.decays[name])
