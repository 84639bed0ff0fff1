"""Structural similarity (SSIM) of images from 0 to 1, and of several scales (Wang et al. 2003, 2004).

Means, variances and the covariance of output and target are those of a Gaussian window around each pixel.  Images are reflected
at their borders, so every pixel has a value, and that of an image is the mean over its pixels and channels: torchmetrics' way.
On tiles the window is a halo, which convolutions exchange, and only the border of the whole image is reflected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""The exponents of five scales, from the finest one (Wang et al. 2003)."""
_CONV = {2: F.conv2d, 3: F.conv3d}
_MEAN_OF_PAIRS = {2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class SimilarityWindow:
    """sigma: standard deviation of the Gaussian, in pixels.  k1, k2: of the constants (k x range of the data)^2; that is 1."""

    sigma: float = 1.5
    k1: float = 0.01
    k2: float = 0.03

    def __post_init__(self) -> None:
        """ValueError: a number that is not above 0."""
        for name in ("sigma", "k1", "k2"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a number above 0 is wanted")

    @property
    def reach_px(self) -> int:
        """How far the window reaches from its center: 5 for a sigma of 1.5."""
        return int(3.5 * self.sigma + 0.5)

    def _weights(self, like: Tensor) -> Tensor:
        at = torch.arange(-self.reach_px, self.reach_px + 1, dtype=like.dtype, device=like.device)
        weights = torch.exp(-((at / self.sigma) ** 2) / 2)
        return weights / weights.sum()

    def means(self, image: Tensor) -> Tensor:
        """The mean of the window around each pixel of (B, C, *pixels), one dim after another."""
        dims, channels, reach = image.ndim - 2, image.shape[1], self.reach_px
        image, weights = F.pad(image, [reach] * (2 * dims), mode="reflect"), self._weights(image)
        for dim in range(dims):
            shape = [1] * dim + [len(weights)] + [1] * (dims - dim - 1)
            image = _CONV[dims](image, weights.view(1, 1, *shape).expand(channels, 1, *shape), groups=channels)
        return image

    def maps(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """SSIM and contrast sensitivity of each pixel, (B, C, *pixels) both.  output, target: of one dtype."""
        c1, c2 = self.k1**2, self.k2**2
        mean, mean_of_target = self.means(output), self.means(target)
        squares, products = mean.square() + mean_of_target.square(), mean * mean_of_target
        variance = (self.means(output.square()) - mean.square()).clamp(min=0)
        variance_of_target = (self.means(target.square()) - mean_of_target.square()).clamp(min=0)
        covariance = self.means(output * target) - products
        sensitivity = (2 * covariance + c2) / (variance + variance_of_target + c2)
        return (2 * products + c1) / (squares + c1) * sensitivity, sensitivity

    def check_size(self, size: Sequence[int], *, scales: int = 1) -> None:
        """ValueError: images are too small for the window at the coarsest of so many scales.  size: their *pixels."""
        least = (self.reach_px + 1 if scales == 1 else 2 * self.reach_px + 1) * 2 ** (scales - 1)
        if min(size) < least:
            raise ValueError(
                f"the images are {' x '.join(map(str, size))} px and SSIM's window of {2 * self.reach_px + 1} px wants {least} "
                f"px or more along each dim{f' at {scales} scales' if scales > 1 else ''}; use larger images or crops, or a "
                f"smaller sigma than {self.sigma:g}{', or fewer betas' if scales > 1 else ''}"
            )


def ssim_of_images(output: Tensor, target: Tensor, window: SimilarityWindow) -> Tensor:
    """(B,) the SSIM of each image.  ValueError: images are too small."""
    window.check_size(output.shape[2:])
    return _mean(window.maps(output, target)[0])


def multiscale_ssim_of_images(
    output: Tensor, target: Tensor, window: SimilarityWindow, betas: Sequence[float] = BETAS
) -> Tensor:
    """(B,) the product over scales of the mean contrast sensitivity, and of SSIM at the coarsest, to the power of their betas.

    Every scale halves the image.  Negative means count as 0, and contrast is not that of reflected pixels, as in torchmetrics.
    ValueError: images are too small.
    """
    dims, reach = output.ndim - 2, window.reach_px
    window.check_size(output.shape[2:], scales=len(betas))
    found = []
    for number, beta in enumerate(betas):
        similarity, sensitivity = window.maps(output, target)
        if number == len(betas) - 1:
            found.append(_mean(similarity).relu() ** beta)
            break
        inner = tuple(slice(reach, extent - reach) for extent in sensitivity.shape[2:])
        found.append(_mean(sensitivity[(slice(None), slice(None), *inner)]).relu() ** beta)
        output, target = (_MEAN_OF_PAIRS[dims](image, 2) for image in (output, target))
    return torch.stack(found).prod(0)


def _mean(values: Tensor) -> Tensor:
    """(B,) the mean over channels and pixels."""
    return values.sum(tuple(range(1, values.ndim))) / prod(values.shape[1:])
