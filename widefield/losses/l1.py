"""The absolute error of numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from widefield.losses import Loss, Targets
from widefield.losses._of_values import loss_of_values


def build(targets: Targets) -> Loss:
    return loss_of_values("l1", targets, partial(F.l1_loss, reduction="none"))


CASES = [(build(Targets("values", 2)), torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 1.0]]), 1.5)]
"""As in cross_entropy."""
