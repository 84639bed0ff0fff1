"""Cross entropy of one class per sample or pixel, with class weights and label smoothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.losses import Loss, Targets, of_samples

_UNUSED = -100
"""torch's own label that does not count, where the targets have none."""


@dataclass(frozen=True)
class CrossEntropy:
    """With class weights the count is the sum of the weights of the targets; of probabilities (mixed samples) their number.

    smoothing: the share of each target that is spread evenly over all classes.
    """

    targets: Targets
    smoothing: float = 0.0

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss(output, target, "sum")

    def count(self, target: Tensor) -> int | Tensor:
        if self.targets.weights is None or target.is_floating_point():
            return self.targets.number(target)
        counted = self.targets.counted(target)
        if counted is None:
            return self.targets.weights.to(target.device)[target].sum()
        return (self.targets.weights.to(target.device)[torch.where(counted, target, 0)] * counted).sum()

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """Of the counted pixels; 0 where there are none.  Class weights weigh it, but do not divide that of one class."""
        losses = self._loss(output, target, "none")
        counted = self.targets.counted(target)
        return losses if counted is None else of_samples(losses) / of_samples(counted).clamp(min=1)

    def _loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            output,
            target,
            weight=None if self.targets.weights is None else self.targets.weights_like(output),
            reduction=reduction,
            ignore_index=_UNUSED if self.targets.ignore is None else self.targets.ignore,
            label_smoothing=self.smoothing,
        )


def build(targets: Targets, *, label_smoothing: float = 0.0) -> Loss:
    """label_smoothing: share of each target spread evenly over all classes (0 to below 1)."""
    targets.refuse_unless("cross_entropy", "class", "pixels")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; a number from 0 to below 1 is wanted")
    return CrossEntropy(targets, label_smoothing)


_EVEN = torch.zeros(2, 2)

CASES = [
    (build(Targets("class", 2)), _EVEN, torch.tensor([0, 1]), 0.6931471805599453),
    (build(Targets("pixels", 2, 255)), torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 1, 255]]]), 0.6931471805599453),
    (build(Targets("class", 2, weights=torch.tensor([1.0, 3.0]))), torch.tensor([[0.0, 0.0], [2.0, 0.0]]),
     torch.tensor([0, 1]), (0.6931471805599453 + 3 * 2.1269280110429727) / 4),
]  # fmt: skip
"""(loss, output, target, the mean loss)."""
