"""Models that give several outputs in training, the main one first: auxiliary heads, or the levels of deep supervision.

Deep supervision (Lee et al. 2015, arXiv:1409.5185) compares the outputs of coarser levels with labels too.  Level l weighs
2^-l over the sum of all, as in nnU-Net, which leaves the coarsest one out.  An output of fewer pixels than the image is
compared with the labels nearest to its pixels' centers, in coordinates of the whole image.  A loss that is a sum over pixels
counts each level as if it had the pixels of the image, so that every level weighs as its weight says, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.config import ModelConfig


def has_heads(config: ModelConfig, output: Any) -> bool:
    return isinstance(output, tuple) and (config.auxiliary is not None or config.deep_supervision)


def loss_of_heads(
    config: ModelConfig, outputs: tuple[Tensor, ...], target: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor], *, sums: bool
) -> Tensor:
    """The losses of all outputs with their weights.

    loss_of: of one output and its labels.  sums: whether it is a sum over pixels, and not over images or a mean.
    """
    total: Tensor | None = None
    for output, weight in zip(outputs, weights_of(config, len(outputs)), strict=True):
        labels = labels_for(output, target) if config.deep_supervision else target
        share = math.prod(outputs[0].shape[2:]) / math.prod(output.shape[2:]) if sums and config.deep_supervision else 1.0
        loss = loss_of(output, labels) * (weight * share)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def weights_of(config: ModelConfig, count: int) -> list[float]:
    """Of `count` outputs."""
    if not config.deep_supervision:
        return [1.0] + [config.auxiliary or 0.0] * (count - 1)
    halves = [0.5**level for level in range(count)]
    return [half / sum(halves) for half in halves]


def labels_for(output: Tensor, target: Tensor) -> Tensor:
    """The labels (B, *pixels) or (B, K, *pixels) nearest to the pixels of an output (B, C, *pixels) of fewer pixels."""
    pixels = output.shape[2:]
    if not pixels or target.shape[-len(pixels) :] == pixels:
        return target
    has_layers = target.ndim == output.ndim
    values = target.to(torch.float64)
    found = F.interpolate(values if has_layers else values[:, None], size=tuple(pixels), mode="nearest-exact")
    return (found if has_layers else found[:, 0]).to(target.dtype)
