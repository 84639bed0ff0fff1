"""The Tversky loss (Salehi et al. 2017, arXiv:1706.05721): Dice with a weight of its own for false and for missed pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.losses import Loss, Targets
from widefield.losses._overlap import checked_smooth, overlap_loss


@dataclass(frozen=True)
class TverskyScore:
    """(I + s) / (I + alpha (P - I) + beta (G - I) + s)."""

    alpha: float
    beta: float
    smooth: float

    def __call__(self, inside: Tensor, p: Tensor, truth: Tensor) -> Tensor:
        return (inside + self.smooth) / (inside + self.alpha * (p - inside) + self.beta * (truth - inside) + self.smooth)


def build(
    targets: Targets,
    *,
    alpha: float = 0.3,
    beta: float = 0.7,
    batch: bool = False,
    background: bool = True,
    smooth: float = 1e-5,
) -> Loss:
    """alpha: the weight of pixels that are falsely of the class; beta: of those that are missed.  The others as in dice."""
    if not (alpha >= 0 and beta >= 0 and alpha + beta > 0):
        raise ValueError(f"alpha is {alpha} and beta is {beta}; numbers of 0 or more are wanted, one of them above 0")
    score = TverskyScore(alpha, beta, checked_smooth(smooth))
    return overlap_loss("tversky", targets, score, batch=batch, background=background)


_SURE = torch.tensor([[[[30.0, 30.0, -30.0, -30.0]], [[-30.0, -30.0, 30.0, 30.0]]]])  # classes 0 0 1 1

CASES = [
    (build(Targets("pixels", 2, 255), background=False), _SURE, torch.tensor([[[0, 1, 1, 1]]]), 1 - 2 / (2 + 0.7)),
    (build(Targets("layers", 1), alpha=0.5, beta=0.5, batch=True), _SURE[:, 1:], torch.tensor([[[[0, 1, 1, 1]]]]), 1 - 4 / 5),
]
"""As in cross_entropy."""
