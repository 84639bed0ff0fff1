"""Binary cross entropy of several classes per sample or pixel, the mean over samples (or pixels) and classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.losses import Loss, Targets, of_samples


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """The weight of a class multiplies the loss where it is present (torch's `pos_weight`) and is not divided by."""

    targets: Targets

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self._losses(output, target).sum()

    def count(self, target: Tensor) -> int:
        return target.numel()

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        return of_samples(self._losses(output, target)) / (target.numel() / len(target))

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        weights = self.targets.weights
        factor = None if weights is None else weights.to(output).view(-1, *[1] * (output.ndim - 2))
        present = target.to(output.dtype)
        if factor is None:
            return F.binary_cross_entropy_with_logits(output, present, reduction="none")
        return factor * present * F.softplus(-output) + (1 - present) * F.softplus(output)


def build(targets: Targets) -> Loss:
    targets.refuse_unless("binary_cross_entropy", "classes", "layers")
    return BinaryCrossEntropy(targets)


CASES = [
    (build(Targets("classes", 2)), torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]]), 0.6931471805599453),
    (build(Targets("layers", 1)), torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0.6931471805599453),
    (build(Targets("classes", 1, weights=torch.tensor([3.0]))), torch.zeros(2, 1), torch.tensor([[0], [1]]),
     2 * 0.6931471805599453),
]  # fmt: skip
"""As in cross_entropy."""
