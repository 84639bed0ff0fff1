"""Heads without anchors (FCOS, Tian et al. 2020, arXiv:2006.09214): what their maps mean, and their losses.

Focal loss of all places, GIoU and centerness of those that learn a box, are added over a batch and divided by the number of
these in the whole batch.  So they are sums, and the loss is finished from the sums of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from widefield.detection.anchors import MapLevels, Size, anchors_of_levels, values_of_places
from widefield.detection.coding import centerness, sides_decoded
from widefield.detection.matching import matched_by_center
from widefield.detection.targets import ImageBoxes, boxes_in


@dataclass(frozen=True)
class PointHeads:
    """Maps of each level: (B, classes, rows, columns) of logits, (B, 4, ...) distances to the sides, in strides and not below
    0, and (B, 1, ...) logits of centerness.  radius: see `matched_by_center`."""

    classes: int
    levels: MapLevels
    radius: float = 1.5
    alpha: float = 0.25
    gamma: float = 2.0

    @property
    def level_channels(self) -> list[tuple[int, ...]]:
        """Of each map of each level."""
        return [(self.classes, 4, 1)] * len(self.levels.strides)

    def anchors_of(self, size: Size, like: Tensor) -> list[Tensor]:
        """A square of the stride's side about each place of each level of an image of `size`."""
        return anchors_of_levels(self.levels, [[stride] for stride in self.levels.strides], [1.0], size, like)

    def sums(self, output: Sequence[Sequence[Tensor]], target: Tensor) -> Tensor:
        """(4,) over the batch: the losses of classes, boxes and centerness, and the number of places that learn a box."""
        values = [[values_of_places(*one) for one in zip(level, (self.classes, 4, 1), strict=True)] for level in output]
        images = list(boxes_in(target))
        anchors = self.anchors_of(images[0].size, output[0][0])
        return torch.stack([self._of_image(row, values, anchors, image.learned) for row, image in enumerate(images)]).sum(0)

    def _of_image(self, row: int, values: list[list[Tensor]], anchors: list[Tensor], image: ImageBoxes) -> Tensor:
        boxes = image.boxes.to(anchors[0])
        matched = matched_by_center(boxes, anchors, radius=self.radius)
        return torch.stack([self._of_level([one[row] for one in level], *rest, boxes, image.labels)
                            for level, *rest in zip(values, anchors, matched, strict=True)]).sum(0)  # fmt: skip

    def _of_level(self, values: list[Tensor], anchors: Tensor, matched: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        logits, sides, central = values
        learns = matched >= 0
        wanted, own, at = torch.zeros_like(logits), boxes[matched[learns]], anchors[learns]
        wanted[learns, labels[matched[learns]]] = 1.0
        return torch.stack([
            sigmoid_focal_loss(logits, wanted, alpha=self.alpha, gamma=self.gamma, reduction="sum"),
            generalized_box_iou_loss(sides_decoded(sides[learns], at), own, reduction="sum"),
            F.binary_cross_entropy_with_logits(central[learns, 0], centerness(own, at), reduction="sum"),
            learns.sum().to(logits.dtype),
        ])  # fmt: skip

    def finish(self, sums: Tensor) -> Tensor:
        """The loss of the batch that has these sums."""
        return sums[:3].sum() / sums[3].clamp(min=1)

    def scores(self, level: Sequence[Tensor]) -> Tensor:
        """(n, classes) of one image's level, of maps without the dim of images."""
        logits, central = (values_of_places(level[part][None], many)[0] for part, many in ((0, self.classes), (2, 1)))
        return (logits.sigmoid() * central.sigmoid()).sqrt()

    def boxes(self, level: Sequence[Tensor], anchors: Tensor, chosen: Tensor) -> Tensor:
        """(M, 4) of the anchors `chosen` (M,) of a level."""
        return sides_decoded(values_of_places(level[1][None], 4)[0][chosen], anchors[chosen])
