"""The section `checkpoint` of a recipe: when the run is saved, and which checkpoints are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from widefield.config.field_types import Positive
from widefield.quantity import Duration, Every
from widefield.section import Section


class CheckpointConfig(Section):
    every: Every = Duration(1, "ep")
    """How often a checkpoint is written; also at the end and when the run is asked to stop."""
    keep_last: Positive = 3
    """How many of the newest checkpoints are kept."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """How many of the best by `checkpoint.best` are kept too."""
    best: Annotated[str, Field(min_length=2)] | None = None
    """The metric by which the best evaluation is chosen, as `loss` or a name in task.metrics (`-NAME`: lower is better); the
    task's headline metric where null.  best.safetensors holds the weights of that evaluation."""
    background: bool = True
    """Write while training goes on."""
