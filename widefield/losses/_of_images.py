"""Losses that each image has as a whole, of which the mean over images is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from widefield.losses import Loss, Targets


@dataclass(frozen=True)
class LossOfImages:
    """each: (output, target) of one dtype to (B,) the loss of each image.  runs_network: whether it runs one of its own."""

    each: Callable[[Tensor, Tensor], Tensor]
    runs_network: bool = False
    counts_images = True

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss_each(output, target).sum()

    def count(self, target: Tensor) -> int:
        return len(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        return self.each(output, target.to(output.dtype))


def loss_of_images(
    name: str, targets: Targets, each: Callable[[Tensor, Tensor], Tensor], *, runs_network: bool = False
) -> Loss:
    """ValueError: targets are no images, or there are class weights."""
    targets.refuse_unless(name, "image")
    targets.refuse_weights(name, "pixels of images have no classes")
    return LossOfImages(each, runs_network)
