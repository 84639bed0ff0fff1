"""Numbers made wrong: NaN, a flipped bit, another shape.  The seed of a fault says which number."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from widefield.faults.fault import PlantedFault

WRONG_NUMBERS = ("nan", "bit_flip")


def spoil_(tensor: Tensor, fault: PlantedFault) -> None:
    """Make one number of a tensor NaN, or flip one of its bits, in place; a tensor without numbers stays.

    Any strides.  A NaN in whole numbers is their largest value.
    """
    if tensor.numel() == 0:
        return
    draw = random.Random(fault.seed)
    with torch.no_grad():
        index = tuple(draw.randrange(size) for size in tensor.shape)
        if fault.kind == "nan":
            tensor[index] = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            return
        number = tensor[index].detach().reshape(1).clone()
        as_bytes = number.view(torch.uint8)
        as_bytes[draw.randrange(len(as_bytes))] ^= 1 << draw.randrange(8)
        tensor[index] = number[0]


def one_less(tensor: Tensor) -> Tensor:
    """A contiguous copy without its last number; of a single number, two."""
    flat = tensor.detach().reshape(-1)
    return (flat[:-1] if flat.numel() > 1 else flat.repeat(2)).clone()


def first_floating(values: Any) -> Tensor | None:
    """The first tensor of numbers with a fraction among nested values."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    nested = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return next((found for value in nested if (found := first_floating(value)) is not None), None)
