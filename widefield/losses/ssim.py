"""1 - the structural similarity of output and target (Wang et al. 2004), per image."""

from __future__ import annotations

import torch
from torch import Tensor

from widefield.losses import Loss, Targets
from widefield.losses._of_images import loss_of_images
from widefield.losses._similarity import SimilarityWindow, ssim_of_images


def build(targets: Targets, *, sigma: float = 1.5, k1: float = 0.01, k2: float = 0.03) -> Loss:
    """sigma: standard deviation of the Gaussian window, in pixels; it reaches 3.5 of them.  k1, k2: of the constants."""
    window = SimilarityWindow(sigma, k1, k2)

    def each(output: Tensor, target: Tensor) -> Tensor:
        return 1 - ssim_of_images(output, target, window)

    return loss_of_images("ssim", targets, each)


_HALF, _ONE = torch.full((2, 1, 6, 7), 0.5), torch.ones(2, 1, 6, 7)  # no contrast: (2 * 0.5 + c1) / (0.25 + 1 + c1) is left

CASES = [
    (build(Targets("image", 1)), _HALF, _HALF, 0.0),
    (build(Targets("image", 1)), _HALF, _ONE, 1 - 1.0001 / 1.2501),
]
"""As in cross_entropy."""
