"""The Charbonnier loss: sqrt(error^2 + epsilon^2), which is absolute for large errors and smooth at 0 (Lai et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from widefield.losses import Loss, Targets
from widefield.losses._of_values import loss_of_values


def build(targets: Targets, *, epsilon: float = 1e-3) -> Loss:
    """epsilon: the loss where there is no error, in the units of the targets; those of images are from 0 to 1."""
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}; a number above 0 is wanted, or take task.loss=l1")

    def each(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() + epsilon**2).sqrt()

    return loss_of_values("charbonnier", targets, each)


CASES = [(build(Targets("values", 2), epsilon=4.0), torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 1.0]]), (4.0 + 5.0) / 2)]
"""As in cross_entropy."""
