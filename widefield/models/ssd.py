"""SSD (Liu et al. 2016, arXiv:1512.02325): heads for the default boxes of each place, on VGG-16 or on a feature pyramid.

Parameters are named as in torchvision.models.detection.SSD, whose default boxes and losses are those of the task `detection`
with method=ssd.  With backbone=vgg16 it is torchvision's ssd300_vgg16.  Class 0 of the maps is the background, so a network
that torchvision trained on COCO, of 91 classes with it, has 90 here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import vgg
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead

from widefield.models import check_counts
from widefield.models._dense_detector import SMALL, DenseDetector, backbone_of
from widefield.models._first_convolution import set_channels

VGG = "vgg16"
_VGG_LEAST_PX = 268
_VGG_WIDTHS, _VGG_BOXES, _VGG_STRIDES = [512, 1024, 512, 256, 256, 256], [4, 6, 6, 6, 4, 4], [8, 16, 32, 64, 100, 300]


class SsdMaps(DenseDetector):
    """Gives of each level (B, boxes * (1 + classes), rows, columns) logits and (B, boxes * 4, rows, columns) codes of boxes."""

    def forward(self, image: Tensor) -> list[tuple[Tensor, ...]]:
        heads = self.head.classification_head.module_list, self.head.regression_head.module_list
        levels = zip(self.backbone(image).values(), *heads, strict=True)
        return [(of_class(features), of_box(features)) for features, of_class, of_box in levels]


class VggFeatures(SSDFeatureExtractorVGG):
    """torchvision's, on VGG-16 as it begins, without building its classifier."""

    def __init__(self, in_channels: int) -> None:
        layers = vgg.make_layers(vgg.cfgs["D"], batch_norm=False)
        for layer in layers:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        super().__init__(layers, highres=False)
        if in_channels != 3:
            set_channels(self, in_channels)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """ValueError: the last map would have no place."""
        if min(image.shape[-2:]) < _VGG_LEAST_PX:
            raise ValueError(
                f"backbone={VGG} is SSD300's, whose last map has no place in an image of {image.shape[-2]} x {image.shape[-1]} "
                f"px; take images of {_VGG_LEAST_PX} x {_VGG_LEAST_PX} px or more, or a backbone with a pyramid, as resnet50"
            )
        return OrderedDict(super().forward(image))


def build(
    in_channels: int,
    num_classes: int,
    *,
    backbone: str = VGG,
    strides: Sequence[int] | None = None,
    boxes: Sequence[int] | None = None,
    features: int = 256,
    width: int = 16,
    norm: str = "batch",
) -> nn.Module:
    """backbone: vgg16, without a pyramid and with six levels of its own; or as of retinanet, with one.

    boxes: default boxes of a place of each level, 2 + 2 * the task's ratios; null: of vgg16 4, 6, 6, 6, 4, 4, else 6 of each.
    strides, features, width, norm: of a pyramid, as of retinanet; strides are [8, 16, 32, 64, 128] where null.
    ValueError: options out of range.
    """
    if backbone == VGG:
        return SsdMaps(VggFeatures(in_channels), SSDHead(_VGG_WIDTHS, _vgg_boxes(strides, boxes), 1 + num_classes))
    strides = [8, 16, 32, 64, 128] if strides is None else list(strides)
    boxes = [6] * len(strides) if boxes is None else list(boxes)
    check_counts(boxes=boxes)
    if len(boxes) != len(strides):
        raise ValueError(f"model.options.boxes is {boxes} and there are {len(strides)} strides; give a number for each level")
    about: dict[str, Any] = {"width": width, "features": features, "norm": norm}
    made = backbone_of(in_channels, backbone=backbone, strides=strides, **about)
    return SsdMaps(made, SSDHead([features] * len(strides), boxes, 1 + num_classes))


def _vgg_boxes(strides: Sequence[int] | None, boxes: Sequence[int] | None) -> list[int]:
    """ValueError: other strides than vgg16 has, or not six numbers of boxes."""
    found = _VGG_BOXES if boxes is None else list(boxes)
    check_counts(boxes=found)
    if len(found) != len(_VGG_BOXES) or (strides is not None and list(strides) != _VGG_STRIDES):
        raise ValueError(
            f"model.options.boxes is {boxes} and strides {strides}; backbone={VGG} has the strides {_VGG_STRIDES} and wants "
            "six numbers of boxes; leave strides out, or take a backbone with a pyramid, as small or resnet50"
        )
    return found


CASES = [
    ({"backbone": SMALL, "strides": [4, 8], "boxes": [4, 6], "width": 4, "features": 8}, torch.Size((2, 3, 33, 17)),
     [torch.Size((2, 44, 9, 5)), torch.Size((2, 16, 9, 5)), torch.Size((2, 66, 5, 3)), torch.Size((2, 24, 5, 3))]),
]  # fmt: skip
"""As in resnet; the sizes of all maps in their order."""
