"""How far made images are from real ones by their brightness and its spread, of images averaged to 8 x 8 blocks.

Over all images each block of each channel has a mean m and a standard deviation s.  Of normal distributions with these the
squared 2-Wasserstein distance is (m - m')^2 + (s - s')^2; what is told is the root of its mean over blocks and channels.  These
are sums over images, so they are one rank's on any plan.  They see a lack of variety and colours that are off, and no detail:
for that there are swd, fid and kid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

SIDE = 8
"""Blocks along each of the last two dims; a volume has one along its depth."""


def blocks_of(images: Tensor) -> Tensor:
    """(B, C, 8, 8) float64 of images (B, C, *pixels), whole or tiled."""
    images = images.double()
    if images.ndim == 5:
        return F.adaptive_avg_pool3d(images, (1, SIDE, SIDE))[:, :, 0]
    return F.adaptive_avg_pool2d(images, SIDE)


def moments_of(made: Tensor, real: Tensor) -> Tensor:
    """(B, 5, C, 8, 8): 1, and of what is made and what is real blocks and their squares; these add up over images."""
    one, other = blocks_of(made), blocks_of(real)
    return torch.stack([torch.ones_like(one), one, one.square(), other, other.square()], 1)


def distance_of(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of the module's docstring, and how much what is made varies over images, of what the real ones do.

    sums: (5, C, 8, 8), `moments_of` added up over images.
    """
    number, made, made_square, real, real_square = sums
    mean, mean_of_real = made / number, real / number
    spread = (made_square / number - mean.square()).clamp(min=0).sqrt()
    spread_of_real = (real_square / number - mean_of_real.square()).clamp(min=0).sqrt()
    distance = ((mean - mean_of_real).square() + (spread - spread_of_real).square()).mean().sqrt()
    return distance, spread.square().mean().sqrt() / spread_of_real.square().mean().sqrt().clamp(min=1e-12)


class PixelMoments(Metric):
    """distance: 0 of what is alike.  spread: 1 of images that vary as the real ones do, 0 where all that is made is alike."""

    full_state_update = False
    higher_is_better = False
    sums: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("sums", torch.zeros(5, channels, SIDE, SIDE, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        self.add(moments_of(answers, target))

    def add(self, measures: Tensor) -> None:
        """Add images by what `moments_of` gives for them."""
        self.sums += measures.sum(0)

    def compute(self) -> dict[str, Tensor]:
        distance, spread = distance_of(self.sums)
        return {"distance": distance, "spread": spread}
