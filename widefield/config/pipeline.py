"""The section `pipeline` of a recipe: the stages of `mesh.stage`."""

from __future__ import annotations

from typing import Literal

from widefield.config.field_types import Positive
from widefield.section import Section


class PipelineConfig(Section):
    """How `mesh.stage` ranks share the layers of a model."""

    micro_batches: Positive | None = None
    """The micro-batches of a pass, so that ranks work at the same time; null: 2 per stage, or 1 where a BatchNorm or another
    operation needs the whole batch."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of forwards and backwards of micro-batches; all give the same numbers."""
    stages: list[str] = []
    """The module that each stage but the first begins with, by name or pattern, as `[layer3]`; by `balance` where empty."""
    balance: Literal["time", "memory"] = "time"
    """What is balanced over the stages: time, estimated by FLOPs, or bytes of weights."""
