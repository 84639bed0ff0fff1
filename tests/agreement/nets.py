"""Small nets for replicas."""

from __future__ import annotations

from torch import Tensor, nn


class Plain(nn.Module):
    """Without normalization, so that copies that agree in every step are data-parallel training."""

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(in_channels, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2)
        self.head = nn.Linear(5, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return self.head(x.mean((2, 3)))
