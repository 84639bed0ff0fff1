"""Image to image: an image from another one, as without noise, or of more pixels; PSNR and SSIM of all images.

Pixels of outputs and targets are scaled as those of the input are, before mean and std: integers to 0..1, whatever range an
image has.  So the range of the data, on which PSNR and SSIM depend, is 1.

Each image has its PSNR and SSIM from sums over its pixels, which add up over tiles, in float64; a window of SSIM that reaches
beyond a tile reads its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss, of_samples
from widefield.losses._similarity import SimilarityWindow, ssim_of_images
from widefield.tasks import output_of
from widefield.tasks._with_loss import WithLoss

_WINDOW = SimilarityWindow()


class ImageQuality(Metric):
    """psnr, ssim: means over images, in dB and up to 1.  psnr_all: from the squared error of all pixels of all images.

    PSNR is infinite where the answer is the target, bit for bit.
    """

    full_state_update = False
    higher_is_better = True
    sums: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("sums", torch.zeros(5, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        self.add(measures_of(answers, target))

    def add(self, measures: Tensor) -> None:
        """Add images by what `measures_of` gives for them."""
        squared, values, similarity = measures.unbind(1)
        psnr = _decibels(squared / values)
        self.sums += torch.stack([squared, values, psnr, similarity, torch.ones_like(psnr)]).sum(1)

    def compute(self) -> dict[str, Tensor]:
        squared, values, psnr, similarity, images = self.sums
        return {"psnr": psnr / images, "ssim": similarity / images, "psnr_all": _decibels(squared / values)}


def _decibels(mean_squared_error: Tensor) -> Tensor:
    return -10 * torch.log10(mean_squared_error)


def measures_of(answers: Tensor, target: Tensor) -> Tensor:
    """(B, 3) float64 of images (B, K, *pixels) from 0 to 1, whole or tiled: squared error, values in that sum, SSIM."""
    answers, target = answers.double(), target.double()
    squared = of_samples((answers - target).square())
    return torch.stack([squared, torch.full_like(squared, prod(target.shape[1:])), ssim_of_images(answers, target, _WINDOW)], 1)


@dataclass(frozen=True)
class Restoration(WithLoss):
    """Targets are (B, K, *pixels) images of `scale` times the input's pixels along each dim.  loss: None is L1."""

    num_classes: int
    scale: int = 1
    headline: str = "psnr"
    higher_is_better: bool = True
    labels: Labels = "image"
    loss: Loss | None = None
    percent: bool = False

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        output = output_of("restoration", output, batch=len(target), classes=self.num_classes, pixels=True)
        if output.shape[2:] != target.shape[2:]:
            wanted, got = (" x ".join(map(str, image.shape[2:])) for image in (target, output))
            raise ValueError(
                f"the targets are {wanted} pixels and the model gives {got}; take a model that keeps the image's size, or "
                f"enlarges it by task.options.scale={self.scale} (restorer)"
            )
        return output

    def answers(self, output: Tensor) -> Tensor:
        """(B, K, *pixels) from 0 to 1, as the loss has them, also outside of that range."""
        return output

    def measures(self, output: Tensor, target: Tensor) -> Tensor:
        """(B, 3) what the metrics add; see `measures_of`.  Of whole images, also where these are tiled."""
        return measures_of(self.fitting(output, target), target)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"quality": ImageQuality()}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"PSNR {values['psnr']:.2f} dB, SSIM {values['ssim']:.4f}"


def build(num_classes: int, *, scale: int = 1) -> Restoration:
    """scale: how many of the target's pixels a pixel of the input is, along each dim: 1, or 2 or more of super-resolution."""
    if type(scale) is not int or scale < 1:
        raise ValueError(f"task.options.scale is {scale!r}; a whole number of 1 or more is wanted, as 2 for twice the pixels")
    return Restoration(num_classes, scale)


_TARGET = torch.full((2, 1, 6, 6), 0.5, dtype=torch.float64)
_OUTPUT = _TARGET + torch.tensor([0.125, 0.25], dtype=torch.float64).view(
    2, 1, 1, 1
)  # SSIM without contrast, as in losses/ssim

CASES = [
    (build(1), _OUTPUT[:1], _TARGET[:1], {"psnr_all": float(_decibels(torch.tensor(0.125**2, dtype=torch.float64)))}),
    (build(2), torch.zeros(2, 2, 6, 6), torch.ones(2, 2, 6, 6), {"psnr": 0.0, "psnr_all": 0.0}),
]
"""As in classification."""
