"""One file per way to lay a model out.  A file here is a strategy; each defines

- `AXIS`: the axis of the mesh that it lays a model out over, or None; several may lay out `replicate`, each a value of
  `mesh.data_strategy`.  `SECTION`, where a user has something to choose: its key in the config and in a Plan, and the name of
  its file in widefield/config/.  Both are literals, for they are read where torch is not loaded, from the file's text;
- `is_used(plan) -> bool`: whether a plan calls for it;
- `check_plan(plan) -> None`: refuses a plan that asks of it what it cannot do exactly, or that makes choices about it where it
  is not there.  Every file is asked about every plan, in the order of `CHECK_ORDER`, lower first: of two problems the earlier
  is told.  It looks at nothing but the plan, so that all ranks refuse alike before they meet;
- `PHASE`: when it is applied, see Phase;
- `apply(model, mesh, *, trial_step=None) -> list[str]`: lays `model` out in place and returns what it chose, a sentence each
  with the reason.  The module stays the object it was, parameter names too, and calling it runs the strategy.
  A strategy of Phase.SPLIT also gets `sample`, a batch of this rank (maybe on meta, without pixels).
  `trial_step()` runs the model on a small batch of this rank and returns a scalar loss, so that a strategy can look before it
  chooses; it leaves no trace.  What the strategy cannot do exactly with this model it refuses, on every rank, before the first
  message;
- `CASES`: small nets on which three optimizer steps over ranks must equal one device.

Gradients are averaged over the data ranks.  A loop whose loss is a sum over samples therefore scales it by the number of
copies of the model / samples of all copies: then the average is the gradient of the mean over the whole batch, however it is
shared out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn


class Phase(IntEnum):
    """The order in which strategies are applied; each finds the model as the earlier ones left it."""

    SPLIT = 1
    """Changes what a rank computes: space, channel, pipeline."""
    KEEP = 2
    """Changes what a rank remembers: recompute, offload."""
    AVERAGE = 3
    """Averages the gradients of what is there by then: data, fully_shard."""


@dataclass(frozen=True)
class TrialStep:
    """A trial pass that says what part of a training pass of this rank it is, for what is counted in it to be scaled."""

    run: Callable[[], Tensor]
    share: float = 1.0

    def __call__(self) -> Tensor:
        return self.run()


@dataclass(frozen=True)
class Case:
    """A small net to train in float64 under a plan, over ranks and on one device."""

    name: str
    build: Callable[[], nn.Module]
    """A net for `shape[1:]` inputs; any output."""
    shape: tuple[int, ...]
    """Of the whole batch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the Plan beside the mesh axis."""
    reason: str = ""
    """A pattern that one of the sentences of `apply` must match."""
