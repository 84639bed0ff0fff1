"""Losses of the overlap of classes with the truth, per image or of all images of a pass together.

Per image and class: I, the probability of the class summed over the pixels of the class, P, summed over all pixels, and G,
the number of pixels of the class.  Pixels that do not count are in none of them.  They add up over tiles, so a score of them
is that of the whole image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.losses import FinishedLoss, Loss, Targets

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From I, P and G to a score, 1 where class and truth are the same."""


def overlap(output: Tensor, target: Tensor, targets: Targets, *, background: bool) -> Tensor:
    """(B, 3, classes): I, P and G of each image and class.  background: whether class 0 is one of them."""
    pixels = tuple(range(2, output.ndim))
    if targets.kind == "layers":
        p, truth, counted = output.sigmoid(), target.to(output.dtype), None
    else:
        p, counted = output.softmax(1), targets.counted(target)
        numbers = torch.arange(targets.outputs, device=target.device).view(-1, *[1] * len(pixels))
        truth = (target.unsqueeze(1) == numbers).to(output.dtype)  # all 0 at a label that does not count
    if counted is not None:
        p = p * counted.unsqueeze(1).to(p.dtype)
    sums = torch.stack([(p * truth).sum(pixels), p.sum(pixels), truth.sum(pixels)], dim=1)
    return sums if background else sums[:, :, 1:]


@dataclass(frozen=True)
class OverlapOfImages:
    """1 - the mean over classes of the score of each image, the mean over images."""

    targets: Targets
    score: Score
    background: bool
    counts_images = True

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss_each(output, target).sum()

    def count(self, target: Tensor) -> int:
        return len(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        sums = overlap(output, target, self.targets, background=self.background)
        return 1 - self.score(*sums.unbind(1)).mean(1)


@dataclass(frozen=True)
class OverlapOfBatch(FinishedLoss):
    """1 - the mean over classes of the score of all images of a pass, as of one large image."""

    targets: Targets
    score: Score
    background: bool

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        return overlap(output, target, self.targets, background=self.background).sum(0)

    def finish(self, sums: Tensor) -> Tensor:
        return 1 - self.score(*sums.unbind(0)).mean()


def overlap_loss(name: str, targets: Targets, score: Score, *, batch: bool, background: bool) -> Loss:
    """ValueError: targets are of no pixels, there are class weights, or no class is left."""
    targets.refuse_unless(name, "pixels", "layers")
    targets.refuse_weights(name, "each class counts once, whatever its size")
    if not background and targets.outputs < 2:
        raise ValueError(f"task.loss={name} with background: false leaves out class 0, and there is no other; set it to true")
    return (OverlapOfBatch if batch else OverlapOfImages)(targets, score, background)


@dataclass(frozen=True)
class DiceScore:
    """(2 I + s) / (P + G + s), as nnU-Net has it."""

    smooth: float

    def __call__(self, inside: Tensor, p: Tensor, truth: Tensor) -> Tensor:
        return (2 * inside + self.smooth) / (p + truth + self.smooth)


def checked_smooth(smooth: float) -> float:
    """ValueError: it is not above 0, so that a class that is nowhere would divide 0 by 0."""
    if not smooth > 0:
        raise ValueError(f"smooth is {smooth}; a number above 0 is wanted, for classes that an image does not have")
    return smooth
