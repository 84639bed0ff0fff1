"""A small residual network for small images or volumes (He et al. 2016, the CIFAR form, arXiv:1512.03385 section 4.2).

A 3x3 stem without pooling, then one stage per width; every stage but the first halves the image.  What the stages give is
pooled over all positions, or over those that count, see _pooling.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from widefield.models import check_counts
from widefield.models._of_dims import BATCH_NORM, CONV, check_dims
from widefield.models._pooling import counts_on, pooling_of


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int, dims: int = 2) -> None:
        super().__init__()
        conv, norm = CONV[dims], BATCH_NORM[dims]
        self.conv1 = conv(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = conv(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(conv(in_channels, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int],
        blocks: int,
        dropout: float,
        dims: int = 2,
        pooling: str = "average",
        attention: int = 32,
        tissue: bool = False,
    ) -> None:
        super().__init__()
        self.tissue = tissue
        conv = CONV[dims](in_channels - tissue, widths[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(conv, BATCH_NORM[dims](widths[0]), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        channels = widths[0]
        for number, width in enumerate(widths):
            for block in range(blocks):
                stages.append(BasicBlock(channels, width, stride=2 if number > 0 and block == 0 else 1, dims=dims))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.pooling = pooling_of(pooling, channels, hidden=attention, dims=dims)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, CONV[dims]):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """From images (B, C, H, W), or volumes (B, C, D, H, W), to (B, num_classes)."""
        counts = None
        if self.tissue:
            image, counts = image[:, :-1], image[:, -1:]
        features = self.stages(self.stem(image))
        counts = None if counts is None else counts_on(counts, features.shape[2:])
        return self.head(self.dropout(self.pooling(features, counts)))


def build(
    in_channels: int,
    num_classes: int,
    *,
    widths: Sequence[int] = (16, 32, 64),
    blocks: int = 1,
    dropout: float = 0.0,
    dims: int = 2,
    pooling: str = "average",
    attention: int = 32,
    tissue: bool = False,
) -> nn.Module:
    """widths: channels of each stage; blocks: residual blocks per stage; dropout: before the head.

    pooling: average, or attention, whose hidden channels are `attention`.
    tissue: the last channel says what counts, as data.tissue gives it, and only that is pooled.
    dims: 2 for images, 3 for volumes; of a recipe without it, those of the data.
    """
    check_counts(widths=widths, blocks=blocks, attention=attention)
    check_dims(dims)
    if not 0 <= dropout < 1:
        raise ValueError(f"model.options.dropout is {dropout}; a number from 0 to below 1 is wanted")
    if type(tissue) is not bool or in_channels - tissue < 1:
        raise ValueError(
            f"model.options.tissue is {tissue!r} with {in_channels} channels; it is true where the last of two or more "
            "says what counts, or false"
        )
    more = {"pooling": pooling, "attention": attention, "tissue": tissue}
    return ResNet(in_channels, num_classes, widths=widths, blocks=blocks, dropout=dropout, dims=dims, **more)


CASES = [
    ({}, torch.Size((2, 1, 8, 8)), torch.Size((2, 10))),
    ({"widths": [8, 16], "blocks": 2}, torch.Size((3, 3, 13, 9)), torch.Size((3, 10))),
    ({"widths": [4, 8], "dims": 3}, torch.Size((2, 1, 5, 9, 7)), torch.Size((2, 10))),
    ({"widths": [4, 8], "pooling": "attention"}, torch.Size((2, 3, 13, 9)), torch.Size((2, 10))),
    ({"widths": [4, 8], "pooling": "attention", "tissue": True}, torch.Size((2, 4, 13, 9)), torch.Size((2, 10))),
    ({"widths": [4, 8], "tissue": True, "dims": 3}, torch.Size((2, 2, 5, 9, 7)), torch.Size((2, 10))),
]
"""(options, image shape, output shape for 10 classes)."""
