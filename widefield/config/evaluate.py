"""When is the model evaluated?  The section `evaluate` of a recipe."""

from __future__ import annotations

from widefield.quantity import Duration, Every
from widefield.section import Section


class EvaluateConfig(Section):
    every: Every = Duration(1, "ep")
    """How often the model is evaluated; always at the end."""
