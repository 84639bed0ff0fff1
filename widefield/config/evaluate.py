"""The section `evaluate` of a recipe: when the model is evaluated."""

from __future__ import annotations

from widefield.quantity import Duration, Every
from widefield.section import Section


class EvaluateConfig(Section):
    every: Every = Duration(1, "ep")
    """How often the model is evaluated; also at the end."""
