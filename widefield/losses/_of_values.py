"""Losses of numbers, or of the pixels of images: the mean over samples and values of a loss of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from widefield.losses import Loss, Targets, of_samples


@dataclass(frozen=True)
class LossOfValues:
    """each: (output, target) of one dtype to the losses, in their shape."""

    each: Callable[[Tensor, Tensor], Tensor]

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self.each(output, target.to(output.dtype)).sum()

    def count(self, target: Tensor) -> int:
        return target.numel()

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        return of_samples(self.each(output, target.to(output.dtype))) / (target.numel() / len(target))


def loss_of_values(name: str, targets: Targets, each: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """ValueError: targets are no numbers, or there are class weights."""
    targets.refuse_unless(name, "values", "image")
    targets.refuse_weights(name, "numbers have no classes")
    return LossOfValues(each)
