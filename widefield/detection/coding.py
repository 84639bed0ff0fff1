"""How maps say boxes: as what makes them of anchors, by center and size, or as distances from a point to the sides.

As in torchvision's BoxCoder and BoxLinearCoder; in the dtype of the values, float32 or wider: at 20,000 px a step of float16 is
16 px, and one of bfloat16 128 px.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = tuple[float, float]
"""Of a center's and of a size's codes, as (10, 5) in SSD and in the second stage of Faster R-CNN."""
_MOST_LOG = math.log(1000 / 16)
"""Of a side's growth, so that its exponential stays finite."""


def _centers(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Centers and sides, (N, 2) each."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return boxes[:, :2] + 0.5 * sides, sides


def encoded(boxes: Tensor, anchors: Tensor, weights: Weights = (1.0, 1.0)) -> Tensor:
    """(N, 4): by how many sides the center is moved, and the logarithm of how the sides grow, times their weights."""
    (center, sides), (own_center, own_sides) = _centers(boxes), _centers(anchors)
    return torch.cat([weights[0] * (center - own_center) / own_sides, weights[1] * torch.log(sides / own_sides)], dim=1)


def decoded(codes: Tensor, anchors: Tensor, weights: Weights = (1.0, 1.0)) -> Tensor:
    """The boxes (N, 4) that `encoded` would make the codes of."""
    own_center, own_sides = _centers(anchors)
    center = codes[:, :2] / weights[0] * own_sides + own_center
    half = 0.5 * (torch.exp((codes[:, 2:] / weights[1]).clamp(max=_MOST_LOG)) * own_sides)
    return torch.cat([center - half, center + half], dim=1)


def sides_decoded(codes: Tensor, anchors: Tensor) -> Tensor:
    """The boxes (N, 4) whose sides are codes (N, 4), left, top, right, bottom, from the anchors' centers, in their sides."""
    center, sides = 0.5 * (anchors[:, :2] + anchors[:, 2:]), anchors[:, 2:] - anchors[:, :2]
    codes = codes * torch.cat([sides, sides], dim=1)
    return torch.cat([center - codes[:, :2], center + codes[:, 2:]], dim=1)


def centerness(boxes: Tensor, anchors: Tensor) -> Tensor:
    """(N,) how central the anchors' centers, all inside, are in their boxes: 1 in the middle, 0 at a side (FCOS)."""
    center = 0.5 * (anchors[:, :2] + anchors[:, 2:])
    before, after = center - boxes[:, :2], boxes[:, 2:] - center
    shares = torch.minimum(before, after) / torch.maximum(before, after)
    return torch.sqrt(shares[:, 0] * shares[:, 1])
