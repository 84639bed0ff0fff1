"""Distances between made and real images by their features in a network: FID and KID.

Frechet inception distance (Heusel et al. 2017, arXiv:1706.08500), of the means m and covariances C (with n - 1) of features:

    |m - m'|^2 + tr(C + C' - 2 (C C')^(1/2))

Kernel inception distance (Binkowski et al. 2018, arXiv:1801.01401): the unbiased estimate of the squared maximum mean
discrepancy with the kernel (x.y / F + 1)^3 of F features, the mean over random subsets.

The network and its weights are given, and decide the number: nothing is downloaded, and what another network gives is
comparable with itself alone.  Images are clipped to 0..1, resized and normalized; features are computed in float64, so that
they do not depend on what else is in a batch, and not on ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.losses._features import IMAGENET_MEAN, IMAGENET_STD, FeatureNetwork, feature_network
from widefield.tasks._cases import CaseSizes

_SEED = 0


class ImageFeatures:
    """(B, F) float64 features of images (B, C, H, W).  size: what they are resized to; None: as they are."""

    def __init__(
        self,
        metric: str,
        *,
        network: str | None = None,
        weights: str | None = None,
        layer: str | None = None,
        size: int | None = 299,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        """network, weights, mean, std: see `feature_network`.  layer: whose output the features are; its pixels are averaged.

        ValueError: no network, an option out of range, or a network that gives no features.
        """
        self.key = f"task.metrics: {metric}"
        if network is None:
            raise ValueError(
                f"{self.key} compares features of a network, of which none is shipped here, and nothing is downloaded; name "
                f"one, as {metric}: {{network: torchvision/inception_v3, weights: FILE, layer: avgpool}}, or with network: "
                "package.module:callable"
            )
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{self.key} has size={size!r}; a whole number of pixels is wanted, or null for no resizing")
        if layer is None and ":" not in network:
            raise ValueError(f"{self.key} has no layer; name that of {network} whose features count, as layer: avgpool")
        self.size = size
        written = os.stat(weights).st_mtime_ns if weights is not None and os.path.exists(weights) else 0
        self.network = _network(network, layer, weights, tuple(mean), tuple(std), written)
        side = size or 128
        self.width = self(torch.zeros(1, len(mean), side, side)).shape[1]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        images = images.double().clamp(0, 1)
        if images.ndim == 4 and self.size is not None:
            images = F.interpolate(images, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)
        found = self.network(images)[-1]
        if found.ndim < 2 or len(found) != len(images):
            raise ValueError(
                f"{self.key}: {self.network.name} gives {tuple(found.shape)} for {len(images)} images; ({len(images)}, F) is "
                "wanted"
            )
        return found.flatten(2).mean(2).double() if found.ndim > 2 else found.double()


@lru_cache(maxsize=2)
def _network(
    network: str, layer: str | None, weights: str | None, mean: tuple[float, ...], std: tuple[float, ...], written: int
) -> FeatureNetwork:
    """Kept between evaluations, and for the metrics that share it.  written: when the file of weights was."""
    return feature_network(network, [] if layer is None else [layer], weights=weights, mean=mean, std=std, key="task.metrics")


def _extended(features: Tensor) -> Tensor:
    """(B, F + 1) on the CPU, 1 in the last column."""
    features = features.cpu()
    return torch.cat([features, features.new_ones(len(features), 1)], 1)


class FrechetDistance:
    """fid.  Its table does not grow with the number of images; NaN of fewer than two."""

    wants_whole, of_classes = True, False

    def __init__(self, sizes: CaseSizes, **options: object) -> None:
        """options: of ImageFeatures."""
        self.features = ImageFeatures("fid", **options)  # type: ignore[arg-type]
        self.table = torch.zeros(2, self.features.width + 1, self.features.width + 1, dtype=torch.float64)
        """Of made and of real images the sum of [f, 1] [f, 1]^T."""

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        for kind, images in enumerate((answers, target)):
            extended = _extended(self.features(images))
            self.table[kind] += extended.T @ extended

    def columns(self) -> dict[str, Tensor]:
        (mean, covariance), (mean_of_real, covariance_of_real) = map(_moments, self.table)
        if not (self.table[:, -1, -1] > 1).all():
            return {"fid": torch.tensor(torch.nan, dtype=torch.float64)}
        return {"fid": frechet_distance(mean, covariance, mean_of_real, covariance_of_real)}


def _moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    number = sums[-1, -1]
    mean = sums[-1, :-1] / number
    return mean, (sums[:-1, :-1] - number * mean[:, None] * mean) / (number - 1)


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """The trace of (C C')^(1/2) is that of (R C' R)^(1/2) with R the root of C, which is symmetric."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * _roots(values) @ vectors.T
    crossed = _roots(torch.linalg.eigvalsh(root @ other_covariance @ root)).sum()
    return (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * crossed


def _roots(values: Tensor) -> Tensor:
    """Of eigenvalues; 0 of those that are rounding, as of fewer images than features, whose roots would be large."""
    least = values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > least, values, 0.0).sqrt()


class KernelDistance:
    """kid, kid_std: mean and standard deviation over subsets.  NaN of fewer than two images."""

    wants_whole, of_classes = True, False

    def __init__(self, sizes: CaseSizes, *, subsets: int = 100, subset_size: int = 1000, **options: object) -> None:
        """subsets of made and of real images are drawn by the images' numbers, of so many or of all that there are.

        options: of ImageFeatures.
        """
        for name, value, least in (("subsets", subsets, 1), ("subset_size", subset_size, 2)):
            if type(value) is not int or value < least:
                raise ValueError(f"task.metrics: kid has {name}={value!r}; a whole number of {least} or more is wanted")
        self.subsets, self.subset_size = subsets, subset_size
        self.features = ImageFeatures("kid", **options)  # type: ignore[arg-type]
        self.table = torch.zeros(sizes.cases, 2, self.features.width + 1, dtype=torch.float64)
        """Of each image [f, 1], made and real; of one that could not be read 0."""

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        for kind, images in enumerate((answers, target)):
            self.table[index.cpu(), kind] += _extended(self.features(images))

    def columns(self) -> dict[str, Tensor]:
        made, real = self.table[self.table[:, 0, -1] > 0, :, :-1].unbind(1)
        if len(made) < 2:
            return dict.fromkeys(("kid", "kid_std"), torch.tensor(torch.nan, dtype=torch.float64))
        generator = torch.Generator().manual_seed(_SEED)
        size, found = min(self.subset_size, len(made)), []
        for _ in range(self.subsets):
            rows, others = (torch.randperm(len(made), generator=generator)[:size] for _ in range(2))
            found.append(kernel_distance(made[rows], real[others]))
        each = torch.stack(found)
        return {"kid": each.mean(), "kid_std": each.std(correction=0)}


def kernel_distance(one: Tensor, other: Tensor) -> Tensor:
    """The unbiased estimate from (n, F) features each: pairs of an image with itself are left out."""
    number, width = one.shape

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / width + 1) ** 3

    within = [(k.sum() - k.trace()) / (number * (number - 1)) for k in (kernel(one, one), kernel(other, other))]
    return within[0] + within[1] - 2 * kernel(one, other).mean()
