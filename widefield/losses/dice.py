"""The soft Dice loss, per image or of the batch of a pass (Milletari et al. 2016; the formula is nnU-Net's)."""

from __future__ import annotations

import torch

from widefield.losses import Loss, Targets
from widefield.losses._overlap import DiceScore, checked_smooth, overlap_loss


def build(targets: Targets, *, batch: bool = False, background: bool = True, smooth: float = 1e-5) -> Loss:
    """batch: add up the pixels of all images of a pass first.  background: whether class 0 counts."""
    score = DiceScore(checked_smooth(smooth))
    return overlap_loss("dice", targets, score, batch=batch, background=background)


_SURE = torch.tensor([[[[30.0, 30.0, -30.0, -30.0]], [[-30.0, -30.0, 30.0, 30.0]]]])  # classes 0 0 1 1
_TRUTH = torch.tensor([[[0, 1, 1, 255]]])

CASES = [
    (build(Targets("pixels", 2, 255)), _SURE, _TRUTH, 1 - (2 / 3 + 2 / 3) / 2),
    (build(Targets("pixels", 2, 255), background=False), _SURE.repeat(2, 1, 1, 1),
     torch.cat([_TRUTH, torch.zeros_like(_TRUTH)]), 1 - (2 / 3 + 0) / 2),
    (build(Targets("pixels", 2, 255), background=False, batch=True), _SURE.repeat(2, 1, 1, 1),
     torch.cat([_TRUTH, torch.zeros_like(_TRUTH)]), 1 - 2 / 5),
    (build(Targets("layers", 1)), _SURE[:, 1:], torch.tensor([[[[0, 1, 1, 1]]]]), 1 - 4 / 5),
]  # fmt: skip
"""As in cross_entropy."""
