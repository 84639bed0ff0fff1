"""A small residual network for small images (He et al. 2016, the CIFAR form, arXiv:1512.03385 section 4.2).

A 3x3 stem without pooling, then one stage per width; every stage but the first halves the image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from widefield.models import check_counts


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            conv = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x_BCHW)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, *, widths: Sequence[int], blocks: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        stages: list[nn.Module] = []
        channels = widths[0]
        for number, width in enumerate(widths):
            for block in range(blocks):
                stages.append(BasicBlock(channels, width, stride=2 if number > 0 and block == 0 else 1))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image_BCHW: Tensor) -> Tensor:
        features = self.stages(self.stem(image_BCHW)).mean((2, 3))
        return self.head(self.dropout(features))


def build(
    in_channels: int, num_classes: int, *, widths: Sequence[int] = (16, 32, 64), blocks: int = 1, dropout: float = 0.0
) -> nn.Module:
    """widths: channels of each stage; blocks: residual blocks per stage; dropout: before the head."""
    check_counts(widths=widths, blocks=blocks)
    if not 0 <= dropout < 1:
        raise ValueError(f"model.options.dropout is {dropout}; a number from 0 to below 1 is wanted")
    return ResNet(in_channels, num_classes, widths=widths, blocks=blocks, dropout=dropout)


CASES = [
    ({}, torch.Size((2, 1, 8, 8)), torch.Size((2, 10))),
    ({"widths": [8, 16], "blocks": 2}, torch.Size((3, 3, 13, 9)), torch.Size((3, 10))),
]
"""(options, image shape, output shape for 10 classes)."""
