"""From a map of features to a vector per image: the mean, or attention, over what counts.

What counts is a channel of 0 and 1 beside the image, as the tissue of a slide.  On the map a position counts by the share of it
in the pixels that the position stands for.  An image of which nothing counts gives zeros.

All of it are sums over positions, so that it is exact on tiles, in space and in time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.models._of_dims import CONV

POOLINGS = ("average", "attention")
_ADAPTIVE = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_LEAST = 1e-12
"""Far below the weight of any position that counts, so that it changes no result but that of an image without one."""


class AveragePooling(nn.Module):
    """The mean of the features, weighted by how much each position counts."""

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """(B, C) of features (B, C, *positions).  counts: (B, 1, *positions), 0 to 1; None: all count alike."""
        positions = tuple(range(2, features.ndim))
        if counts is None:
            return features.mean(positions)
        return (features * counts).sum(positions) / counts.sum(positions).clamp(min=_LEAST)


class GatedAttentionPooling(nn.Module):
    """Gated attention (Ilse, Tomczak & Welling 2018, arXiv:1802.04712, equation 9) over the positions of a map.

    The weight of a position h is its share of all exp(w . (tanh(V h) * sigmoid(U h))), times how much it counts.
    """

    def __init__(self, channels: int, hidden: int, *, dims: int = 2) -> None:
        super().__init__()
        self.content = CONV[dims](channels, hidden, 1)
        self.gate = CONV[dims](channels, hidden, 1)
        self.score = CONV[dims](hidden, 1, 1, bias=False)  # a bias would cancel out

    def forward(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """As AveragePooling's."""
        positions = tuple(range(2, features.ndim))
        score = self.score(torch.tanh(self.content(features)) * torch.sigmoid(self.gate(features)))
        if counts is not None:
            score = score.masked_fill(counts == 0, -torch.inf)
        # any constant cancels out; unlike the maximum, this one is merged from the parts that tiles in time have
        constant = score.detach().logsumexp(positions, keepdim=True)
        weight = torch.exp(score - constant.clamp(min=torch.finfo(score.dtype).min))  # where nothing counts it is -inf
        weight = weight if counts is None else weight * counts
        return (features * weight).sum(positions) / weight.sum(positions).clamp(min=_LEAST)


def counts_on(counts: Tensor, size: torch.Size) -> Tensor:
    """How much each position of a map of `size` counts, from (B, 1, *pixels) of the image: the mean of its pixels."""
    return _ADAPTIVE[len(size)](counts.clamp(0, 1), tuple(size))


def pooling_of(name: str, channels: int, *, hidden: int, dims: int) -> nn.Module:
    """ValueError: no such pooling."""
    if name not in POOLINGS:
        raise ValueError(f"model.options.pooling is {name!r}; it is one of {', '.join(POOLINGS)}")
    return AveragePooling() if name == "average" else GatedAttentionPooling(channels, hidden, dims=dims)
