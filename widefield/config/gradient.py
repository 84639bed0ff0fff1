"""The section `gradient` of a recipe: accumulation, and the averaging of gradients over ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from widefield.config.field_types import Positive
from widefield.section import Section

Compression = Literal["none", "fp16", "bf16", "powersgd"]


class GradientConfig(Section):
    accumulate: Positive = 1
    """Passes per optimizer step; each has its part of the batch."""
    bucket_mib: Annotated[float, Field(gt=0)] | None = 25.0
    """Size of the buckets in which gradients are sent; null: measured at the start.  From 3 ranks on another size may change
    the last bits of sums, so set a number for a run that must resume bit for bit."""
    compression: Compression = "none"
    """The form in which gradients are sent; anything but none gives up exactness."""
    powersgd_rank: Positive = 1
    """Rank of PowerSGD's factors; higher is closer to exact and more bytes."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    """Steps of plain all-reduce before PowerSGD begins."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_agreement(cls, value: Any) -> Any:
        """ValueError: the key of earlier versions."""
        if isinstance(value, dict) and "agreement" in value:
            raise ValueError(
                f"gradient.agreement is a section of its own now; write agreement.name={value['agreement']}, or "
                f"agreement: {value['agreement']} in the recipe"
            )
        return value
