"""The focal loss (Lin et al. 2017, arXiv:1708.02002): cross entropy times (1 - p)^gamma, p the probability of the truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.losses import Loss, Targets, of_samples
from widefield.losses.binary_cross_entropy import BinaryCrossEntropy
from widefield.losses.cross_entropy import CrossEntropy


@dataclass(frozen=True)
class Focal:
    """Softmax of one class, sigmoid of several.  Counts, and so class weights, are those of cross entropy: it is gamma = 0."""

    targets: Targets
    gamma: float

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self._losses(output, target).sum()

    def count(self, target: Tensor) -> int | Tensor:
        return self._like.count(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """Of what counts; 0 where nothing does."""
        losses, counted = self._losses(output, target), self.targets.counted(target)
        number = losses[0].numel() if counted is None else of_samples(counted).clamp(min=1)
        return of_samples(losses) / number

    @property
    def _like(self) -> Loss:
        one = self.targets.kind in ("class", "pixels")
        return CrossEntropy(self.targets) if one else BinaryCrossEntropy(self.targets)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The losses in the shape of the target, 0 where it does not count."""
        if self.targets.kind in ("classes", "layers"):
            return self._of_several(output, target.to(output.dtype))
        if target.is_floating_point():
            raise ValueError("the focal loss is for class numbers, not for mixed samples; set data.mixup=0 and data.cutmix=0")
        counted = self.targets.counted(target)
        truth = target if counted is None else torch.where(counted, target, 0)
        log_p = -F.nll_loss(output.log_softmax(1), truth, reduction="none")
        losses = -((-torch.expm1(log_p)) ** self.gamma) * log_p
        if self.targets.weights is not None:
            losses = losses * self.targets.weights_like(output)[truth]
        return losses if counted is None else torch.where(counted, losses, 0.0)

    def _of_several(self, output: Tensor, present: Tensor) -> Tensor:
        p = output.sigmoid()
        missed = (1 - p) ** self.gamma * present * F.softplus(-output)
        if self.targets.weights is not None:
            missed = missed * self.targets.weights.to(output).view(-1, *[1] * (output.ndim - 2))
        return missed + p**self.gamma * (1 - present) * F.softplus(output)


def build(targets: Targets, *, gamma: float = 2.0) -> Loss:
    """gamma: how much less the loss weighs what is right already; 0 is cross entropy."""
    targets.refuse_unless("focal", "class", "pixels", "classes", "layers")
    if not gamma >= 0:
        raise ValueError(f"gamma is {gamma}; a number of 0 or more is wanted")
    return Focal(targets, gamma)


CASES = [
    (build(Targets("class", 2)), torch.zeros(2, 2), torch.tensor([0, 1]), 0.25 * 0.6931471805599453),
    (build(Targets("pixels", 2, 255), gamma=1), torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 255]]]), 0.5 * 0.6931471805599453),
    (build(Targets("classes", 2)), torch.zeros(1, 2), torch.tensor([[0, 1]]), 0.25 * 0.6931471805599453),
]
"""As in cross_entropy."""
