"""The total variation of the output: the mean over its pixels of the absolute differences to the next pixel along each dim.

It says nothing of the target: it is one of the terms of a `weighted` loss, that smooths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widefield.losses import Loss, Targets, of_samples
from widefield.losses._of_images import loss_of_images


def build(targets: Targets) -> Loss:
    return loss_of_images("total_variation", targets, _variation)


def _variation(output: Tensor, target: Tensor) -> Tensor:
    """(B,) of images (B, C, *pixels)."""
    pixels = output[0].numel()
    steps = [output.narrow(dim, 1, output.shape[dim] - 1) - output.narrow(dim, 0, output.shape[dim] - 1)
             for dim in range(2, output.ndim)]  # fmt: skip
    return torch.stack([of_samples(step.abs()) for step in steps]).sum(0) / pixels


_STAIRS = torch.tensor([[[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]]])

CASES = [(build(Targets("image", 1)), _STAIRS, _STAIRS, 4 / 6)]
"""As in cross_entropy."""
