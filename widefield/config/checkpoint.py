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
    """How many of the best by the task's headline metric are kept too."""
    background: bool = True
    """Write while training goes on."""
