"""A generator of noise and its discriminator, as DCGAN has them (Radford et al. 2016, arXiv:1511.06434).

A vector of noise becomes a map of `start` x `start` pixels, which each of `strides` steps doubles: images are start * 2^strides
pixels a side, 4 * 2^4 = 64 in the paper.  With start=None noise is a map already (Jetchev et al. 2016, arXiv:1611.08207), and
images have 2^strides times its pixels along each dim, however many these are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from widefield.models._of_dims import BATCH_NORM, CONV, CONV_TRANSPOSE

DISCRIMINATOR_DEFAULTS: dict[str, Any] = {"width": 64, "strides": 4, "start": 4, "spectral": False, "normalized": True}


class OfJoinedInputs(nn.Sequential):
    """Layers in a row, called with one image, or with several that are joined by their channels."""

    def forward(self, *images: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(images[0] if len(images) == 1 else torch.cat(images, 1))


def dcgan_generator(
    in_channels: int,
    num_classes: int,
    *,
    width: int = 64,
    strides: int = 4,
    start: int | None = 4,
    normalized: bool = True,
    dims: int = 2,
) -> nn.Module:
    """From (B, in_channels, *extents) noise, of one pixel where there is a `start`, to images (B, num_classes, *pixels).

    width: channels before the last doubling, twice as many before each earlier one.  normalized: batch norms.
    A sigmoid bounds images to 0..1, as the paper's tanh does to -1..1.
    """
    widths = [width * 2**level for level in reversed(range(strides))]
    into = (in_channels, widths[0])
    first = CONV[dims](*into, 3, padding=1) if start is None else CONV_TRANSPOSE[dims](*into, start)
    layers = _followed(first, normalized, dims)
    for before, after in zip(widths, widths[1:], strict=False):
        layers += _followed(CONV_TRANSPOSE[dims](before, after, 4, 2, 1), normalized, dims)
    return _initialized(nn.Sequential(*layers, CONV_TRANSPOSE[dims](width, num_classes, 4, 2, 1), nn.Sigmoid()))


def dcgan_discriminator(
    in_channels: int, *, width: int, strides: int, start: int | None, spectral: bool, normalized: bool, dims: int
) -> nn.Module:
    """From images of start * 2^strides pixels a side to scores (B, 1, 1, 1); with start=None of any to a map of scores."""
    layers: list[nn.Module] = []
    widths = [in_channels, *(width * 2**level for level in range(strides))]
    for level, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
        has_norm = normalized and level > 0
        layers += [CONV[dims](before, after, 4, 2, 1, bias=not has_norm)]
        layers += [*([BATCH_NORM[dims](after)] if has_norm else []), nn.LeakyReLU(0.2)]
    layers += [CONV[dims](widths[-1], 1, 3, padding=1) if start is None else CONV[dims](widths[-1], 1, start)]
    judge = _initialized(OfJoinedInputs(*layers))
    for layer in judge if spectral else ():
        if isinstance(layer, CONV[dims]):
            spectral_norm(layer)
    return judge


def _followed(layer: Any, normalized: bool, dims: int) -> list[nn.Module]:
    """A layer with its norm, which takes the bias away, and a ReLU."""
    if not normalized:
        return [layer, nn.ReLU()]
    layer.register_parameter("bias", None)
    return [layer, BATCH_NORM[dims](layer.out_channels), nn.ReLU()]


@torch.no_grad()
def _initialized(model: nn.Module) -> nn.Module:
    """Weights of a deviation of 0.02, as in the paper."""
    for module in model.modules():
        if isinstance(module, (*CONV.values(), *CONV_TRANSPOSE.values())):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, tuple(BATCH_NORM.values())):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return model
