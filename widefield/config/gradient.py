"""The section `gradient` of a recipe: accumulation, and the averaging of gradients over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Positive
from widefield.section import Section

Agreement = Literal["mean", "adasum"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]


class GradientConfig(Section):
    accumulate: Positive = 1
    """Passes per optimizer step; each has its part of the batch."""
    bucket_mib: Annotated[float, Field(gt=0)] | None = 25.0
    """Size of the buckets in which gradients are sent; null: measured at the start.  From 3 ranks on another size may change
    the last bits of sums, so set a number for a run that must resume bit for bit."""
    compression: Compression = "none"
    """The form in which gradients are sent; anything but none gives up exactness."""
    agreement: Agreement = "mean"
    """How the gradients of copies are combined: their mean, or Adasum (arXiv:2006.02924), which needs a power of two of copies
    and does not give one device's gradient."""
    powersgd_rank: Positive = 1
    """Rank of PowerSGD's factors; higher is closer to exact and more bytes."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    """Steps of plain all-reduce before PowerSGD begins."""
