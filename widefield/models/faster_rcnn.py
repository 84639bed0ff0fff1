"""Faster R-CNN (Ren et al. 2015, arXiv:1506.01497): a backbone, a feature pyramid, proposals, and a second stage for boxes.

`maps` has the first stage, whose maps are what the model gives; `roi_heads` has the second one, which the task `detection` with
method=faster_rcnn calls with what features show in boxes.  But for `maps.` in front of `backbone` and `rpn`, parameters are
named as in torchvision.models.detection.FasterRCNN, whose losses the task has.  Class 0 of the second stage is the background,
so a network that torchvision trained on COCO, of 91 classes with it, has 90 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead

from widefield.models import check_counts
from widefield.models._dense_detector import SMALL, backbone_of

POOLED_SIDE = 7


class ProposalHead(nn.Module):
    """Under `head` what torchvision's region proposal network learns."""

    def __init__(self, features: int, anchors: int) -> None:
        super().__init__()
        self.head = RPNHead(features, anchors)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head.conv(features)
        return self.head.cls_logits(hidden), self.head.bbox_pred(hidden)


class RegionMaps(nn.Module):
    """Gives of each level (B, anchors, rows, columns) logits, (B, anchors * 4, ...) codes and (B, features, ...) features."""

    def __init__(self, backbone: nn.Module, rpn: nn.Module, *, coarser: bool) -> None:
        super().__init__()
        self.backbone, self.rpn, self.coarser = backbone, rpn, coarser

    def forward(self, image: Tensor) -> list[tuple[Tensor, ...]]:
        features = list(self.backbone(image).values())
        features += [F.max_pool2d(features[-1], 1, 2)] if self.coarser else []
        return [(*self.rpn(one), one) for one in features]


class BoxHeads(nn.Module):
    """From (N, features, 7, 7) to logits (N, 1 + classes) and codes (N, (1 + classes) * 4)."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.box_head = TwoMLPHead(features * POOLED_SIDE**2, hidden)
        self.box_predictor = FastRCNNPredictor(hidden, 1 + classes)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.box_predictor(self.box_head(pooled))


class FasterRcnn(nn.Module):
    def __init__(self, maps: nn.Module, roi_heads: nn.Module) -> None:
        super().__init__()
        self.maps, self.roi_heads = maps, roi_heads

    def forward(self, image: Tensor) -> list[tuple[Tensor, ...]]:
        return self.maps(image)


def build(
    in_channels: int,
    num_classes: int,
    *,
    backbone: str = "resnet50",
    strides: Sequence[int] = (4, 8, 16, 32, 64),
    anchors: int = 3,
    features: int = 256,
    hidden: int = 1024,
    width: int = 16,
    norm: str = "batch",
) -> nn.Module:
    """backbone, features, width, norm: as of retinanet.  anchors: of a place.  hidden: numbers of a box in the second stage.

    strides: as of retinanet, but that a last one of 64 after 32 is every second place of the level before, as in torchvision.
    ValueError: options out of range.
    """
    check_counts(anchors=anchors, hidden=hidden)
    coarser = list(strides[-2:]) == [32, 64] and backbone != SMALL
    about: dict[str, Any] = {"width": width, "features": features, "norm": norm}
    made = backbone_of(in_channels, backbone=backbone, strides=list(strides)[:-1] if coarser else list(strides), **about)
    maps = RegionMaps(made, ProposalHead(features, anchors), coarser=coarser)
    return FasterRcnn(maps, BoxHeads(features, hidden, num_classes))


CASES = [
    ({"backbone": SMALL, "strides": [4, 8], "anchors": 3, "width": 4, "features": 8, "hidden": 16}, torch.Size((2, 3, 33, 17)),
     [torch.Size((2, many, *size)) for size in ((9, 5), (5, 3)) for many in (3, 12, 8)]),
]  # fmt: skip
"""As in resnet; the sizes of all maps in their order."""
