"""Parallelism strategies, one per file.  Each file defines

- `AXIS`: the axis of the mesh that it uses, or None; several may use `replicate`, each a value of `mesh.data_strategy`.
  `SECTION`, where the user has choices: its key in the config and in a Plan, and the name of its file in widefield/config/.
  Both are literals: they are read from the file's text, without importing torch;
- `is_used(plan) -> bool`: whether a plan calls for it;
- `check_plan(plan) -> None`: refuses a plan that it cannot carry out exactly, or that makes choices for it without using it.
  Every file checks every plan, in the order of `CHECK_ORDER`, lower first; the first problem is raised.  It reads only the
  plan, so that all ranks refuse the same before they communicate;
- `PHASE`: when it is applied, see Phase;
- `apply(model, mesh, *, trial_step=None) -> Choices`: changes `model` in place and returns what it chose, a sentence each with
  the reason, and a Fallback for each operation that does not run as the plan asks.
  The module stays the same object with the same parameter names, and calling it runs the strategy.
  A strategy of Phase.SPLIT also gets `sample`, a batch of this rank, or a meta tensor of its shape.
  `trial_step()` runs the model on a small batch of this rank and returns a scalar loss, so that a strategy can look before it
  chooses.  What the strategy cannot do exactly with this model it refuses, on every rank, before the first message;
- `CASES`: small nets on which three optimizer steps over ranks must equal one device.

Gradients are averaged over the data ranks.  A loop whose loss is a sum over samples therefore scales it by the number of
copies of the model / samples of all copies: then the average is the gradient of the mean over the whole batch, however the
samples are divided among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from widefield.fallback import Fallback

Choices = Sequence[str | Fallback]


class Phase(IntEnum):
    """The order in which strategies are applied; each finds the model as the earlier ones left it."""

    SPLIT = 1
    """Changes what a rank computes: space, channel, pipeline."""
    KEEP = 2
    """Changes what a rank saves for the backward: recompute, offload."""
    AVERAGE = 3
    """Averages the gradients of the parameters that this rank has by then: data, fully_shard."""


@dataclass(frozen=True)
class TrialStep:
    """A trial pass.  share: its batch / the batch of a training pass of this rank; bytes counted in it are divided by it."""

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
    """The shape of the whole batch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the Plan besides the mesh axis."""
    reason: str = ""
    """A regular expression that one of the sentences of `apply` must match."""
