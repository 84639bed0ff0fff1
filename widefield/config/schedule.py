"""The section `schedule` of a recipe: the length of the run, and the curve of the learning rate."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from widefield.quantity import Duration, DurationField, Every
from widefield.section import Section


class ScheduleConfig(Section):
    name: str = "cosine"
    """constant, cosine, step, polynomial or onecycle, or `package.module:callable`; a function of the samples seen."""
    length: DurationField = Duration(90, "ep")
    """How long the run trains."""
    warmup: DurationField = Duration(0, "step")
    """Linear rise from warmup_from times the peak."""
    warmup_from: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Where the warm-up begins, as a share of the peak."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where cosine, polynomial and onecycle end, as a share of the peak."""
    every: Every | None = None
    """`step`: multiply by gamma this often."""
    gamma: Annotated[float, Field(gt=0)] = 0.1
    """`step`: the factor."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """`polynomial`: the exponent."""
