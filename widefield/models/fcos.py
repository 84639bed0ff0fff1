"""FCOS (Tian et al. 2020, arXiv:2006.09214): a backbone, a feature pyramid, and heads without anchors.

Parameters are named as in torchvision.models.detection.FCOS, whose losses are those of the task `detection` with method=fcos.
The heads have group normalization, whose statistics are of whole maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.fcos import FCOSHead

from widefield.models._dense_detector import SMALL, DenseDetector, backbone_of


class FcosMaps(DenseDetector):
    """Gives of each level logits (B, classes, rows, columns), distances to the sides (B, 4, ...) and centerness (B, 1, ...)."""

    def maps(self, features: Tensor) -> tuple[Tensor, ...]:
        classes, boxes = self.head.classification_head, self.head.regression_head
        of_boxes = boxes.conv(features)
        return classes.cls_logits(classes.conv(features)), F.relu(boxes.bbox_reg(of_boxes)), boxes.bbox_ctrness(of_boxes)


def build(
    in_channels: int,
    num_classes: int,
    *,
    backbone: str = "resnet50",
    strides: Sequence[int] = (8, 16, 32, 64, 128),
    features: int = 256,
    convolutions: int = 4,
    width: int = 16,
    norm: str = "batch",
) -> nn.Module:
    """backbone, strides, features, width, norm: as of retinanet.  convolutions: of each head.

    ValueError: `features` do not divide into 32 groups.
    """
    if type(features) is not int or features % 32 or type(convolutions) is not int or convolutions < 1:
        raise ValueError(
            f"model.options.features is {features!r} and convolutions {convolutions!r}; FCOS's heads normalize 32 "
            "groups of channels: give a multiple of 32, and 1 convolution or more"
        )
    about: dict[str, Any] = {"width": width, "features": features, "norm": norm}
    made = backbone_of(in_channels, backbone=backbone, strides=strides, **about)
    return FcosMaps(made, FCOSHead(features, 1, num_classes, convolutions))


CASES = [
    ({"backbone": SMALL, "strides": [4, 8], "width": 4, "features": 32, "convolutions": 1}, torch.Size((2, 3, 33, 17)),
     [torch.Size((2, many, *size)) for size in ((9, 5), (5, 3)) for many in (10, 4, 1)]),
]  # fmt: skip
"""As in resnet; the sizes of all maps in their order."""
