"""Types of fields that several sections have, with their bounds.  Durations and memory: quantity.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field


def _finite(value: Any) -> Any:
    """`value`.  ValueError: a number in it is not finite, which checks of models and transforms often let pass."""
    odd = next((number for number in _numbers(value) if not math.isfinite(number)), None)
    if odd is not None:
        raise ValueError(f"it holds {odd}, which is no finite number; give a number, or leave it out")
    return value


def _numbers(value: Any) -> Iterator[float]:
    left = [value]
    while left:  # no recursion: a value of a recipe may be nested deep
        one = left.pop()
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if isinstance(one, float):
            yield one


Labels = Literal["class", "classes", "values", "pixels", "layers", "image", "boxes", "views", "noise"]
"""What a sample's target is, and a task learns.

class: an int.  classes: (K,) uint8 of 0 and 1, of several classes at a time.  values: (K,) float32, of a regression.
pixels: (H, W) class numbers, uint8 or int64.  layers: (K, H, W) uint8 of 0 and 1, of pixels with several classes at a time.
image: (K, s H, s W) of the image's own dtype, another image, s times as large along each dim.
boxes: (N, 7) float64, the boxes of objects and their classes, see widefield/detection/targets.py.
views: of tasks alone, which look at no target but at two views of each image.
noise: of tasks alone, whose model makes images of noise; the image itself, from 0 to 1, is what they are compared with.
Of volumes (D, H, W), (K, D, H, W) and (K, s D, s H, s W).
"""
Options = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Keyword arguments of a model, a format, a task or an optimizer."""
Listed = Annotated[list[Any], AfterValidator(_finite)]
"""Transforms by name, each with its arguments."""
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Spread = Annotated[float, Field(ge=1e-6)]
"""A standard deviation of pixels from 0 to 1: dividing by less overflows."""
