"""Dice and cross entropy together, as nnU-Net trains: the cross entropy of all pixels of a pass, and Dice per image or of all.

Several classes per pixel have binary cross entropy.  Class weights weigh the cross entropy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widefield.losses import FinishedLoss, Loss, Targets, quotient
from widefield.losses import build as build_loss
from widefield.losses.dice import build as build_dice


@dataclass(frozen=True)
class DiceCrossEntropy(FinishedLoss):
    """The sums are those of the cross entropy and its count, then those of Dice: of the batch, or the loss and its count."""

    entropy: Loss
    dice: Loss
    weights: tuple[float, float]
    """Of Dice and of the cross entropy."""

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        first = [self.entropy.loss_sum(output, target), self.entropy.count(target)]
        if hasattr(self.dice, "sums"):
            return torch.cat([_row(first, output), self.dice.sums(output, target).flatten()])
        return _row([*first, self.dice.loss_sum(output, target), self.dice.count(target)], output)

    def finish(self, sums: Tensor) -> Tensor:
        entropy, dice = quotient(sums[0], sums[1]), sums[2:]
        overlap = self.dice.finish(dice.view(3, -1)) if hasattr(self.dice, "finish") else quotient(dice[0], dice[1])
        return self.weights[0] * overlap + self.weights[1] * entropy


def _row(numbers: list[int | Tensor], like: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in numbers])


def build(
    targets: Targets,
    *,
    dice: float = 1.0,
    cross_entropy: float = 1.0,
    label_smoothing: float = 0.0,
    batch: bool = False,
    background: bool = True,
    smooth: float = 1e-5,
) -> Loss:
    """dice, cross_entropy: their weights.  The others as in dice and cross_entropy."""
    targets.refuse_unless("dice_cross_entropy", "pixels", "layers")
    if targets.kind == "layers" and label_smoothing:
        raise ValueError(f"label_smoothing is {label_smoothing} and several classes per pixel have none; leave it out")
    if not (dice >= 0 and cross_entropy >= 0 and dice + cross_entropy > 0):
        raise ValueError(f"the weights are {dice} and {cross_entropy}; numbers of 0 or more are wanted, one of them above 0")
    options = {} if targets.kind == "layers" else {"label_smoothing": label_smoothing}
    entropy = build_loss("binary_cross_entropy" if targets.kind == "layers" else "cross_entropy", targets, options)
    overlap = build_dice(replace(targets, weights=None), batch=batch, background=background, smooth=smooth)
    return DiceCrossEntropy(entropy, overlap, (dice, cross_entropy))


_EVEN = torch.zeros(2, 2, 1, 2)  # p = 1/2 everywhere: Dice is 2 / (2 + 2) of a class on all of two pixels, 1 / (1 + 1) on one

CASES = [
    (build(Targets("pixels", 2, 255)), _EVEN, torch.tensor([[[0, 1]], [[1, 0]]]), 0.5 + 0.6931471805599453),
    (build(Targets("pixels", 2, 255), batch=True, cross_entropy=2), _EVEN, torch.tensor([[[0, 1]], [[1, 255]]]),
     1 - (1 / 2.5 + 2 / 3.5) / 2 + 2 * 0.6931471805599453),
    (build(Targets("layers", 2), dice=0), _EVEN, torch.zeros(2, 2, 1, 2), 0.6931471805599453),
]  # fmt: skip
"""As in cross_entropy."""
