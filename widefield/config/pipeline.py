"""How do the stages of `mesh.stage` share the work?  The section `pipeline` of a recipe."""

from __future__ import annotations

from typing import Literal

from widefield.config.field_types import Positive
from widefield.section import Section


class PipelineConfig(Section):
    """How `mesh.stage` ranks share the layers of a model."""

    micro_batches: Positive | None = None
    """Parts that a pass is cut into along the batch, so that ranks work at the same time; 2 per stage where null, and 1 where
    a BatchNorm or an operation needs the whole batch."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of forwards and backwards of micro-batches; all give the same numbers."""
    stages: list[str] = []
    """The module that each stage but the first begins with, by name or pattern, as `[layer3]`; by `balance` where empty."""
    balance: Literal["time", "memory"] = "time"
    """What stages are to have alike: seconds, counted in operations, or bytes of weights."""
