"""Image to image at any size: residual convolutions at the input's resolution, then `scale` times the pixels (as EDSR).

There is no normalization, which would change the contrast of what is to be restored (Lim et al. 2017, arXiv:1707.02921).  What
the network makes is added to what one convolution makes of the input by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.models import check_counts


class ResidualPair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.second(F.relu(self.first(image)))


class Restorer(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, *, width: int, blocks: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.head = nn.Conv2d(in_channels, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualPair(width) for _ in range(blocks)))
        self.tail = nn.Conv2d(width, num_classes * scale**2, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, num_classes * scale**2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        made = self.tail(self.body(self.head(image))) + self.skip(image)
        return made if self.scale == 1 else F.pixel_shuffle(made, self.scale)


def build(in_channels: int, num_classes: int, *, width: int = 32, blocks: int = 4, scale: int = 1) -> nn.Module:
    """num_classes: channels of the output.  width: channels in between.  blocks: pairs of convolutions with a residual.

    scale: pixels of the output per pixel of the input, along each dim; that of the task.
    """
    check_counts(width=width, blocks=blocks, scale=scale)
    return Restorer(in_channels, num_classes, width=width, blocks=blocks, scale=scale)


CASES = [
    ({"width": 4, "blocks": 1}, torch.Size((2, 3, 13, 9)), torch.Size((2, 10, 13, 9))),
    ({"width": 4, "blocks": 2, "scale": 3}, torch.Size((1, 2, 5, 4)), torch.Size((1, 10, 15, 12))),
]
"""As in resnet."""
