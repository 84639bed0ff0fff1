"""The section `evaluate` of a recipe: when the model is evaluated."""

from __future__ import annotations

from widefield.config.field_types import Positive
from widefield.quantity import Duration, Every
from widefield.section import Section


class EvaluateConfig(Section):
    every: Every = Duration(1, "ep")
    """How often the model is evaluated; also at the end."""
    patience: Positive | None = None
    """End the run, as complete, after so many evaluations in a row without a better `checkpoint.best`; null: never."""
