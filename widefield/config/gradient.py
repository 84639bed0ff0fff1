"""How do gradients add up over passes and travel between ranks?  The section `gradient` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Positive
from widefield.section import Section

Agreement = Literal["mean", "adasum"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]


class GradientConfig(Section):
    accumulate: Positive = 1
    """Passes per optimizer step; each takes its share of the batch."""
    bucket_mib: Annotated[float, Field(gt=0)] | None = 25.0
    """Size of the buckets that gradients travel in; null: measured at the start.  From 3 ranks on another size may change the
    last bits of sums, so a run that is to resume bit for bit wants a number."""
    compression: Compression = "none"
    """What gradients travel as between ranks; anything but none gives up exactness."""
    agreement: Agreement = "mean"
    """How the gradients of copies become one: their mean, or Adasum (arXiv:2006.02924), which adds up what is orthogonal; it
    wants a power of two of copies, and is not one device's gradient."""
    powersgd_rank: Positive = 1
    """Rank of PowerSGD's factors; higher is closer to exact and more bytes."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    """Steps of plain all-reduce before PowerSGD begins."""
