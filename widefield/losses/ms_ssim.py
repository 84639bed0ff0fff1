"""1 - the multi-scale structural similarity of output and target (Wang et al. 2003), per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from widefield.losses import Loss, Targets
from widefield.losses._of_images import loss_of_images
from widefield.losses._similarity import BETAS, SimilarityWindow, multiscale_ssim_of_images


def build(targets: Targets, *, sigma: float = 1.5, betas: Sequence[float] = BETAS, k1: float = 0.01, k2: float = 0.03) -> Loss:
    """betas: the exponent of each scale, from the finest one.  sigma, k1, k2: as in ssim.

    Each side of an image has 11 px or more at the coarsest scale: 176 px with five betas, 44 px with three.
    """
    window, powers = SimilarityWindow(sigma, k1, k2), tuple(betas)
    if not powers or min(powers) <= 0:
        raise ValueError(f"betas are {list(powers)}; one number above 0 per scale is wanted, as [0.3, 0.3, 0.4]")

    def each(output: Tensor, target: Tensor) -> Tensor:
        return 1 - multiscale_ssim_of_images(output, target, window, powers)

    return loss_of_images("ms_ssim", targets, each)


_HALF, _ONE = torch.full((2, 1, 22, 24), 0.5), torch.ones(2, 1, 22, 24)

CASES = [
    (build(Targets("image", 1), betas=[0.5, 0.5]), _HALF, _HALF, 0.0),
    (build(Targets("image", 1), betas=[0.5, 0.5]), _HALF, _ONE, 1 - (1.0001 / 1.2501) ** 0.5),
]
"""As in cross_entropy."""
