"""Heads with anchors (RetinaNet, Lin et al. 2017, arXiv:1708.02002): what their maps mean, and their losses.

The loss of an image is the focal loss of all its anchors, and that of the boxes of the anchors that learn one, both divided by
the number of these; that of a batch is the mean over images.  So it adds up over images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from widefield.detection.anchors import MapLevels, Size, anchors_of_levels, values_of_places
from widefield.detection.coding import decoded, encoded
from widefield.detection.matching import BETWEEN, matched_by_overlap
from widefield.detection.targets import ImageBoxes, boxes_in

BoxLoss = Literal["l1", "smooth_l1", "giou"]


@dataclass(frozen=True)
class AnchorHeads:
    """Maps of each level: (B, A * classes, rows, columns) of logits, and (B, A * 4, rows, columns) of codes.

    sizes: of each level's anchors, in pixels.  ratios: of height to width.  below, above: see `matched_by_overlap`.
    """

    classes: int
    levels: MapLevels
    sizes: tuple[tuple[int, ...], ...]
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    below: float = 0.4
    above: float = 0.5
    alpha: float = 0.25
    gamma: float = 2.0
    box_loss: BoxLoss = "l1"

    @property
    def level_channels(self) -> list[tuple[int, ...]]:
        """Of each map of each level."""
        anchors = len(self.sizes[0]) * len(self.ratios)
        return [(anchors * self.classes, anchors * 4)] * len(self.sizes)

    def anchors_of(self, size: Size, like: Tensor) -> list[Tensor]:
        """The anchors (n, 4) of each level of an image of `size`."""
        return anchors_of_levels(self.levels, self.sizes, self.ratios, size, like)

    def losses(self, output: Sequence[Sequence[Tensor]], target: Tensor) -> Tensor:
        """(B, 2) the losses of classes and of boxes of each image."""
        values = [[values_of_places(*one) for one in zip(level, (self.classes, 4), strict=True)] for level in output]
        images = list(boxes_in(target))
        anchors = self.anchors_of(images[0].size, output[0][0])
        return torch.stack([self._of_image(row, values, anchors, image.learned) for row, image in enumerate(images)])

    def _of_image(self, row: int, values: list[list[Tensor]], anchors: list[Tensor], image: ImageBoxes) -> Tensor:
        boxes = image.boxes.to(anchors[0])
        matched = matched_by_overlap(boxes, anchors, below=self.below, above=self.above)
        total = sum(self._of_level([one[row] for one in level], *rest, boxes, image.labels)
                    for level, *rest in zip(values, anchors, matched, strict=True))  # fmt: skip
        assert isinstance(total, Tensor)
        return total / max(1, sum(int((level >= 0).sum()) for level in matched))

    def _of_level(self, values: list[Tensor], anchors: Tensor, matched: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        logits, codes = values
        learns, counts = matched >= 0, matched != BETWEEN
        wanted = torch.zeros_like(logits)
        wanted[learns, labels[matched[learns]]] = 1.0
        of_classes = sigmoid_focal_loss(logits[counts], wanted[counts], alpha=self.alpha, gamma=self.gamma, reduction="sum")
        return torch.stack([of_classes, self._of_boxes(codes[learns], anchors[learns], boxes[matched[learns]])])

    def _of_boxes(self, codes: Tensor, anchors: Tensor, boxes: Tensor) -> Tensor:
        if self.box_loss == "giou":
            return generalized_box_iou_loss(decoded(codes, anchors), boxes, reduction="sum")
        of = F.l1_loss if self.box_loss == "l1" else F.smooth_l1_loss
        return of(codes, encoded(boxes, anchors), reduction="sum")

    def scores(self, level: Sequence[Tensor]) -> Tensor:
        """(n, classes) of one image's level, of maps without the dim of images."""
        return values_of_places(level[0][None], self.classes)[0].sigmoid()

    def boxes(self, level: Sequence[Tensor], anchors: Tensor, chosen: Tensor) -> Tensor:
        """(M, 4) of the anchors `chosen` (M,) of a level."""
        return decoded(values_of_places(level[1][None], 4)[0][chosen], anchors[chosen])
