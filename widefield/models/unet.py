"""A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597) for images of any size, with an output per pixel.

Convolutions are padded, so the output has the image's size; for odd sizes, upsampling resizes to the skip's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.models import check_counts
from widefield.naming import did_you_mean

GROUPS = 8
"""Groups of GroupNorm; the greatest common divisor with the channels where it does not divide them."""


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def _double(in_channels: int, channels: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for start in (in_channels, channels):
        conv = nn.Conv2d(start, channels, 3, padding=1, bias=False)
        layers += [conv, _norm(norm, channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, *, widths: Sequence[int], norm: str) -> None:
        super().__init__()
        starts = [in_channels, *widths]
        self.down = nn.ModuleList(_double(start, width, norm) for start, width in zip(starts, widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        deep = list(reversed(widths))
        pairs = list(zip(deep, deep[1:], strict=False))
        self.narrow = nn.ModuleList(nn.Conv2d(below, here, 1) for below, here in pairs)
        self.up = nn.ModuleList(_double(2 * here, here, norm) for _, here in pairs)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        x, skips = image_BCHW, []
        for number, down in enumerate(self.down):
            x = down(self.pool(x) if number else x)
            skips.append(x)
        skips.pop()
        for narrow, up in zip(self.narrow, self.up, strict=True):
            skip = skips.pop()
            x = F.interpolate(narrow(x), size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)


def build(in_channels: int, num_classes: int, *, widths: Sequence[int] = (16, 32, 64, 128), norm: str = "batch") -> nn.Module:
    """widths: channels of each level, from the image's size downwards; each further level halves the image.

    norm: `batch` or `group`; group normalization uses the statistics of each image, so it suits batches of one.
    """
    check_counts(widths=widths)
    if norm not in ("batch", "group"):
        raise ValueError(
            f"model.options.norm is {norm!r}{did_you_mean(str(norm), ['batch', 'group'])} It can be batch or group"
        )
    return UNet(in_channels, num_classes, widths=widths, norm=norm)


CASES = [
    ({"widths": [4, 8, 16]}, torch.Size((1, 3, 21, 18)), torch.Size((1, 10, 21, 18))),
    ({"widths": [4, 6, 16], "norm": "group"}, torch.Size((1, 3, 21, 18)), torch.Size((1, 10, 21, 18))),
]
"""(options, image shape, output shape for 10 classes)."""
