"""The section `ema` of a recipe: an exponential moving average of the weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from widefield.section import Section


class EmaConfig(Section):
    decay: Annotated[float, Field(gt=0, lt=1)]
    """The weight of the old average at each step; the average is evaluated and exported."""
