"""The section `guard` of a recipe: what is looked for before each optimizer step, and what is done where it is found."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Positive
from widefield.section import Section

Answer = Literal["stop", "skip", "roll_back"]
"""What is done about a batch."""
Score = Annotated[float, Field(gt=0)]


class GuardConfig(Section):
    non_finite: Answer = "stop"
    """What is done where the loss or the gradient is NaN or infinite. stop: the run ends. skip: the batch is left out and
    counts as seen. roll_back: the run goes back to its newest checkpoint, and later passes over the batch."""
    gradient: bool = True
    """Look at the norm of the whole gradient too, not at the loss alone: one small message a step."""
    spike: Literal["off", "stop", "skip", "roll_back"] = "off"
    """What is done where the loss or the norm of the gradient is far above what was usual in the last `window` steps."""
    loss_score: Score | None = 10.0
    """A loss is a spike above this robust z-score: (loss - median) / (1.4826 x median deviation); null: not judged."""
    gradient_score: Score | None = 10.0
    """The same for the logarithm of the gradient's norm."""
    window: Annotated[int, Field(ge=8)] = 100
    """The number of steps that say what is usual; spikes are judged from half as many on."""
    most: Positive = 5
    """The run stops where more batches than this were skipped or rolled back among the last `window`."""
    batches: Annotated[int, Field(ge=0)] = 3
    """How many of the newest refused batches are kept in the run folder, for `widefield replay`."""
    checksum_every: Positive | None = None
    """Steps between comparisons of the replicas' weights, buffers and optimizer states, bit by bit; also before each save.
    Null: never."""
    differs: Literal["stop", "roll_back"] = "stop"
    """What is done where replicas differ: the run ends, or goes back to its newest checkpoint and takes the same batches
    again."""
