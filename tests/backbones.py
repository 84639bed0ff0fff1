"""A backbone, a transform and a loss of views of one's own, as a recipe names them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def of_channels(in_channels: int, num_classes: int) -> nn.Module:
    """Its fully connected layer is called with the pixels of each channel."""
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.Flatten(2), nn.Linear(35, num_classes))


def cut_anyhow(image: Tensor) -> Tensor:
    """A transform after which images differ in size."""
    return image[:, : int(torch.randint(1, 9, ()))]


def distance(output: Tensor, target: Tensor) -> Tensor:
    """The loss of SimSiam, without its predictor."""
    return -F.cosine_similarity(output[:, 0], output[:, 1], dim=1)


def features_of_one_channel() -> nn.Module:
    """A network for losses."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True))


def features_of_three_channels(channels: int = 3) -> nn.Module:
    """(B, 5) features, always the same."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(channels, 5, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.random.set_rng_state(state)
    return made


def features_of_grey() -> nn.Module:
    return features_of_three_channels(1)


def sum_of_all() -> Callable[[Tensor], Tensor]:
    """A function that gives no features."""
    return torch.sum
