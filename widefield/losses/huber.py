"""The Huber loss of numbers: squared up to `delta`, absolute beyond."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from widefield.losses import Loss, Targets
from widefield.losses._of_values import loss_of_values


def build(targets: Targets, *, delta: float = 1.0) -> Loss:
    """delta: the error from which the loss grows in proportion to it."""
    if not delta > 0:
        raise ValueError(f"delta is {delta}; a number above 0 is wanted")
    return loss_of_values("huber", targets, partial(F.huber_loss, reduction="none", delta=delta))


CASES = [(build(Targets("values", 2)), torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 1.0]]), (0.5 + 1.5) / 2)]
"""As in cross_entropy."""
