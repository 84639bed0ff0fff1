"""Are the weights averaged over steps?  The section `ema` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from widefield.section import Section


class EmaConfig(Section):
    decay: Annotated[float, Field(gt=0, lt=1)]
    """Weight of the old average at each step; the average is what is evaluated and exported."""
