"""A backbone of one's own, as a recipe names it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedAndUnused(nn.Module):
    """One convolution twice, statistics of the batch, dropout, a parameter that nothing uses, and a fully connected layer."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem, self.twice = nn.Conv2d(in_channels, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.drop, self.fc = nn.BatchNorm2d(6), nn.Dropout(0.3), nn.Linear(6, num_classes)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, image: Tensor) -> Tensor:
        found = self.norm(self.twice(self.twice(self.stem(image)).relu()))
        return self.fc(self.drop(found.relu()).mean((2, 3)))
