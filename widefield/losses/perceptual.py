"""The distance of the features of output and target in a network that was trained for something else, as VGG's.

The weighted sum over layers of the mean over their channels and pixels (Johnson et al. 2016, arXiv:1603.08155, with squares;
pix2pixHD, Wang et al. 2018, arXiv:1711.11585, with absolute values, and these layers of VGG-19).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from widefield.losses import Loss, Targets, of_samples
from widefield.losses._features import IMAGENET_MEAN, IMAGENET_STD, FeatureNetwork, feature_network
from widefield.losses._of_images import loss_of_images

VGG19 = {"features.1": 1 / 32, "features.6": 1 / 16, "features.11": 1 / 8, "features.20": 1 / 4, "features.29": 1.0}
"""pix2pixHD's: the first ReLU of each of the five blocks."""
_DISTANCES = {"l1": Tensor.abs, "mse": Tensor.square}


def build(
    targets: Targets,
    *,
    network: str = "torchvision/vgg19",
    weights: str | None = None,
    layers: Mapping[str, float] | None = None,
    distance: str = "l1",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Loss:
    """network, weights, mean, std: see `feature_network`; weights is a file.

    layers: by the name of a layer its weight; None: pix2pixHD's of torchvision/vgg19, and of package.module:callable what it
        gives, each with a weight of 1.
    distance: l1 or mse.
    """
    if distance not in _DISTANCES:
        raise ValueError(f"distance is {distance!r}; l1 or mse is wanted")
    chosen = VGG19 if layers is None and network == "torchvision/vgg19" else layers or {}
    if not isinstance(chosen, Mapping) or not all(_is_weight(weight) for weight in chosen.values()):
        raise ValueError(f"layers is {layers!r}; names with weights of 0 or more are wanted, as {{features.1: 1}}")
    if not chosen and ":" not in network:
        raise ValueError(f"layers is empty and {network} has no layers that are usual; name them, as {{layer1: 1, layer2: 1}}")
    of = feature_network(network, list(chosen), weights=weights, mean=mean, std=std, key="task.loss=perceptual")
    return _between(targets, of, list(chosen.values()), distance)


def _between(targets: Targets, of: FeatureNetwork, weights: Sequence[float], distance: str) -> Loss:
    """weights: of the layers; [] weighs each as 1."""

    def each(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = of(target)
        pairs = zip(of(output), wanted, weights or [1.0] * len(wanted), strict=True)
        return torch.stack([weight * _mean(_DISTANCES[distance](one - other)) for one, other, weight in pairs]).sum(0)

    return loss_of_images("perceptual", targets, each, runs_network=True)


def _mean(values: Tensor) -> Tensor:
    """(B,) the mean over channels and pixels."""
    return of_samples(values) / prod(values.shape[1:])


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_HALF, _ONE = torch.full((2, 1, 6, 7), 0.5), torch.ones(2, 1, 6, 7)
_PIXELS = FeatureNetwork(nn.Identity(), [0.0], [0.5], "the pixels")

CASES = [
    (_between(Targets("image", 1), _PIXELS, [], "l1"), _HALF, _ONE, 1.0),
    (_between(Targets("image", 1), _PIXELS, [0.5], "mse"), _HALF, _ONE, 0.5),
]
"""As in cross_entropy."""
