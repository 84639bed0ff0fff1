"""RetinaNet (Lin et al. 2017, arXiv:1708.02002): a backbone, a feature pyramid, and heads for the anchors of each place.

Parameters are named as in torchvision.models.detection.RetinaNet, whose anchors and losses are those of the task `detection`.
Classes are numbered from 0 without one for the background; a network trained by torchvision on COCO has 91, of which 0 is
unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.retinanet import RetinaNetHead

from widefield.models import check_counts
from widefield.models._dense_detector import SMALL, DenseDetector, backbone_of


class RetinaNetMaps(DenseDetector):
    """Gives of each level (B, anchors * classes, rows, columns) logits and (B, anchors * 4, rows, columns) codes of boxes."""

    def maps(self, features: Tensor) -> tuple[Tensor, ...]:
        classes, boxes = self.head.classification_head, self.head.regression_head
        return classes.cls_logits(classes.conv(features)), boxes.bbox_reg(boxes.conv(features))


def build(
    in_channels: int,
    num_classes: int,
    *,
    backbone: str = "resnet50",
    strides: Sequence[int] = (8, 16, 32, 64, 128),
    anchors: int = 9,
    features: int = 256,
    width: int = 16,
    norm: str = "batch",
    head_norm: str | None = None,
    p6_from_c5: bool = False,
) -> nn.Module:
    """backbone: `small`, a ResNet of torchvision by name, or timm/NAME.  strides: pixels of the image per place of each level.

    anchors: of a place, the task's octaves times its ratios.  features: channels of the pyramid.  width: of `small`'s first
    convolutions.  norm: `batch`, `frozen` (statistics and all), or `group`, of `small`.  head_norm: `group` normalizes 32
    groups of channels in the heads.  p6_from_c5: make the level of stride 64 of the backbone's last features.  These two make
    it torchvision's retinanet_resnet50_fpn_v2.
    ValueError: options out of range.
    """
    check_counts(anchors=anchors)
    if head_norm not in (None, "group") or (head_norm and features % 32):
        raise ValueError(
            f"model.options.head_norm is {head_norm!r} and features {features}; null is wanted, or group with 32, 64, ... "
            "features"
        )
    about: dict[str, Any] = {"width": width, "features": features, "norm": norm, "p6_from_c5": p6_from_c5}
    made = backbone_of(in_channels, backbone=backbone, strides=strides, **about)
    group = partial(nn.GroupNorm, 32) if head_norm else None
    return RetinaNetMaps(made, RetinaNetHead(features, anchors, num_classes, norm_layer=group))


CASES = [
    ({"backbone": SMALL, "strides": [4, 8], "anchors": 3, "width": 4, "features": 8}, torch.Size((2, 3, 33, 17)),
     [torch.Size((2, 30, 9, 5)), torch.Size((2, 12, 9, 5)), torch.Size((2, 30, 5, 3)), torch.Size((2, 12, 5, 3))]),
]  # fmt: skip
"""As in resnet; the sizes of all maps in their order."""
