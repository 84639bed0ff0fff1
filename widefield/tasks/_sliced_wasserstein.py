"""The sliced Wasserstein distance between patches of made images and of real ones, at several sizes (Karras et al. 2018,
arXiv:1710.10196, section 5).  It needs no network's features.

Each image gives patches at drawn places of each level of its Laplacian pyramid.  Over all images, patches are scaled to mean 0
and standard deviation 1 of the real ones, in each channel, and projected on random directions; the distance in a direction is
the mean difference of the sorted numbers.  Differences to the paper: levels are halved by the mean of 2 x 2 pixels, made and
real patches lie at the same places, and both are scaled by the real ones, so that colours that are off count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.tasks._cases import CaseSizes

THOUSANDTHS = 1000
_SEED = 0


class SlicedWasserstein:
    """swd: the mean over levels and directions, times 1,000; swd_0, swd_1, ...: of each level, from the finest."""

    wants_whole, of_classes = True, False

    def __init__(self, sizes: CaseSizes, *, patches: int = 64, side: int = 7, levels: int = 3, directions: int = 256) -> None:
        """patches: of each image and level.  side: of a patch, in pixels.  ValueError: one of them is out of range."""
        for name, value in (("patches", patches), ("side", side), ("levels", levels), ("directions", directions)):
            if type(value) is not int or value < 1:
                raise ValueError(f"task.metrics: swd has {name}={value!r}; a whole number of 1 or more is wanted")
        self.side, self.directions = side, directions
        self.table = torch.zeros(sizes.cases, levels, 2, patches, sizes.classes, side * side)
        """Of each image and level the patches that were made, and the real ones; 0.2 MiB for 3 levels of 3 channels."""

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        """answers, target: (B, channels, H, W) from 0 to 1.

        ValueError: they are volumes, or too small for a patch at the coarsest level.
        """
        if target.ndim != 4:
            raise ValueError(f"task.metrics: swd compares patches of two dims and images have {target.ndim - 2}; leave swd out")
        levels = self.table.shape[1]
        smallest = min(target.shape[2:]) >> (levels - 1)
        if smallest < self.side:
            size = " x ".join(map(str, target.shape[2:]))
            raise ValueError(
                f"task.metrics: swd compares patches of {self.side} x {self.side} px on {levels} levels and images are {size} "
                f"px, at the coarsest {smallest}; give it fewer levels, as swd: {{levels: 1}}, or larger images"
            )
        for row, *both in zip(index.tolist(), answers.float().cpu(), target.float().cpu(), strict=True):
            for kind, image in enumerate(both):
                for level, detail in enumerate(laplacian_pyramid(image, levels)):
                    self.table[row, level, kind] += self._patches(detail, row, level)

    def _patches(self, image: Tensor, row: int, level: int) -> Tensor:
        """(patches, channels, side * side) of a (channels, H, W) image."""
        generator = torch.Generator().manual_seed(self.table.shape[1] * row + level)
        count = self.table.shape[3]
        tops, lefts = (torch.randint(extent - self.side + 1, (count,), generator=generator) for extent in image.shape[1:])
        run = torch.arange(self.side)
        rows, columns = tops[:, None, None] + run[:, None], lefts[:, None, None] + run
        return image[:, rows, columns].flatten(2).transpose(0, 1)

    def columns(self) -> dict[str, Tensor]:
        each = torch.stack(
            [self._distance(*of_level) for of_level in self.table.double().permute(1, 2, 0, 3, 4, 5).flatten(2, 3)]
        )
        return {"swd": each.mean(), **{f"swd_{level}": distance for level, distance in enumerate(each)}}

    def _distance(self, made: Tensor, real: Tensor) -> Tensor:
        """Between (patches, channels, pixels) of all images."""
        mean, spread = real.mean((0, 2), keepdim=True), real.std((0, 2), correction=0, keepdim=True).clamp(min=1e-8)
        made, real = (((one - mean) / spread).flatten(1) for one in (made, real))
        generator = torch.Generator().manual_seed(_SEED)
        directions = F.normalize(torch.randn(made.shape[1], self.directions, generator=generator, dtype=torch.float64), dim=0)
        one, other = ((patches @ directions).sort(0).values for patches in (made, real))
        return THOUSANDTHS * (one - other).abs().mean()


def laplacian_pyramid(image: Tensor, levels: int) -> Iterator[Tensor]:
    """What each level has that the next does not, from the finest; then the coarsest itself.  image: (channels, H, W)."""
    for _ in range(levels - 1):
        smaller = F.avg_pool2d(image, 2, ceil_mode=True, count_include_pad=False)
        yield image - F.interpolate(smaller[None], size=image.shape[1:], mode="bilinear", align_corners=False)[0]
        image = smaller
    yield image
