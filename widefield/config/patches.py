"""The section `data.patches`: training on windows of images that are too large for the memory of a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from widefield.config.field_types import Positive
from widefield.section import Section

_RANDOM_ALONE = ("per_image", "foreground", "classes")


class PatchesConfig(Section):
    size: Annotated[list[Positive], Field(min_length=2, max_length=3)] = [512, 512]
    """Height and width of a patch, or depth and these of volumes, in pixels."""
    draw: Literal["random", "cover"] = "random"
    """`random`: patches anywhere in an image, or on its foreground.  `cover`: all pixels of every image once an epoch, on a
    grid that is shifted from epoch to epoch; what a patch shows beyond the image does not count."""
    per_image: Positive | None = None
    """Random patches of each image and epoch; null is 8."""
    foreground: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of random patches that are centred on a pixel of a drawn class; null is 0.33 where pixels have labels, or 0."""
    classes: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """The numbers of the classes that are foreground; null for all but class 0, or for all where pixels may have several."""
    evaluate: Literal["cover", "whole"] = "cover"
    """What is evaluated: a `cover` of every image by patches, each pixel once, or `whole` images."""

    @field_validator(*_RANDOM_ALONE)
    @classmethod
    def _of_random_ones(cls, value: object, about: ValidationInfo) -> object:
        if value is not None and about.data.get("draw") == "cover":
            raise ValueError(
                f"it is of draw=random and draw is cover, which has every pixel once; leave {about.field_name} out"
            )
        return value
