"""The section `log` of a recipe: what is printed and recorded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from widefield.config.field_types import Positive
from widefield.section import Section


class LogConfig(Section):
    every: Positive = 10
    """Steps between printed lines."""
    tensorboard: bool = True
    """Write TensorBoard's files into the run folder."""
    wandb: str | None = None
    """A Weights & Biases project to log to (needs the extra `wandb`)."""
    mlflow: str | None = None
    """An MLflow experiment to log to (needs the extra `mlflow`); where, says MLFLOW_TRACKING_URI, as ever."""
    timeline: bool = False
    """Record steps 3 to 12 of this process, each operation and collective, as a Chrome trace per rank in the run folder."""
    stall_seconds: Annotated[float, Field(ge=0.1)] | None = 60.0
    """After how many seconds in one step rank 0 prints which ranks are missing; null: never."""
    hang_seconds: Annotated[float, Field(ge=1.0)] | None = 600.0
    """End the run, naming the missing ranks, once nothing has changed on any rank for so many seconds; null: never."""
    predict: bool = False
    """Predict the memory and the time of a step before the run begins, for the report to set beside what was measured; takes
    from some seconds to a minute. With mesh.auto=true it is always there."""
