"""Which boxes are found in an image: the best of each level, then of those that overlap the best one of each class.

As torchvision's, but for three things.  The most candidates of a level and the most boxes of an image are for a megapixel, and
grow with larger images; where a limit leaves something out, it is told.  Equal scores are taken in the order of levels, places,
anchors and classes, on every device.  Non-maximum suppression runs class by class on boxes as they are: to move classes apart
by an offset would leave boxes of 20,000 px an eighth of a pixel in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchvision.ops import nms

from widefield.detection.anchors import Size

MEGAPIXEL = 10**6


class Heads(Protocol):
    """What AnchorHeads and PointHeads have in common."""

    classes: int

    def anchors_of(self, size: Size, like: Tensor) -> list[Tensor]: ...

    def scores(self, level: Sequence[Tensor]) -> Tensor: ...

    def boxes(self, level: Sequence[Tensor], anchors: Tensor, chosen: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class FoundBoxes:
    """What is found in an image, best first: boxes (M, 4), scores (M,), labels (M,) int64.

    cut_candidates, cut_detections: how many were left out by the limits of levels, and by that of the image.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    cut_candidates: int = 0
    cut_detections: int = 0


@dataclass(frozen=True)
class Limits:
    """score: the least.  overlap: the largest IoU of two boxes of one class.  candidates: of a level, or of a class.
    detections: of an image.

    The last two are for up to a megapixel, and in proportion for more.
    """

    score: float
    overlap: float
    candidates: int
    detections: int

    def most(self, number: int, size: Size) -> int:
        """`number`, of a megapixel or less, for an image of `size`."""
        return scaled_to(number, size)


def scaled_to(number: int, size: Size) -> int:
    """A number of a megapixel or less, for an image of `size`: in proportion for more, rounded up."""
    return -(-number * max(MEGAPIXEL, size[0] * size[1]) // MEGAPIXEL)


def found_in(heads: Heads, output: Sequence[Sequence[Tensor]], size: Size, limits: Limits) -> FoundBoxes:
    """What is found in one image of `size`, from its maps without the dim of images, of float32 or wider."""
    most = limits.most(limits.candidates, size)
    parts, left_out = [], 0
    for level, anchors in zip(output, heads.anchors_of(size, output[0][0]), strict=True):
        scores = heads.scores(level).flatten()
        above = (scores > limits.score).nonzero().flatten()
        order = scores[above].sort(descending=True, stable=True).indices[:most]
        chosen = above[order]
        left_out += len(above) - len(chosen)
        boxes = heads.boxes(level, anchors, chosen.div(heads.classes, rounding_mode="floor"))
        parts.append((clipped(boxes, size), scores[chosen], chosen % heads.classes))
    boxes, scores, labels = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return _shown(boxes, scores, labels, size, limits, left_out)


def found_of_classes(boxes: Tensor, scores: Tensor, size: Size, limits: Limits, *, smallest_px: float = 0.0) -> FoundBoxes:
    """What is found in one image of `size` where each class takes its own best candidates.

    boxes: (n, 4), or (n, classes, 4) of each class.  scores: (n, classes).  smallest_px: boxes with shorter sides are left out.
    """
    most, boxes = limits.most(limits.candidates, size), clipped(boxes, size)
    parts, left_out = [(boxes.new_zeros(0, 4), scores.new_zeros(0), scores.new_zeros(0, dtype=torch.int64))], 0
    for label in range(scores.shape[1]):
        own, score = boxes if boxes.ndim == 2 else boxes[:, label], scores[:, label]
        above = ((score > limits.score) & is_as_large(own, smallest_px)).nonzero().flatten()
        order = score[above].sort(descending=True, stable=True).indices[:most]
        chosen = above[order]
        left_out += len(above) - len(chosen)
        parts.append((own[chosen], score[chosen], torch.full_like(chosen, label)))
    return _shown(*(torch.cat(columns) for columns in zip(*parts, strict=True)), size, limits, left_out)


def is_as_large(boxes: Tensor, px: float) -> Tensor:
    """(n,) whether both sides of boxes (n, 4) have so many pixels."""
    return (boxes[:, 2:] - boxes[:, :2] >= px).all(1)


def _shown(boxes: Tensor, scores: Tensor, labels: Tensor, size: Size, limits: Limits, left_out: int) -> FoundBoxes:
    kept = not_suppressed(boxes, scores, labels, limits.overlap)
    shown = kept[: limits.most(limits.detections, size)]
    return FoundBoxes(boxes[shown], scores[shown], labels[shown], left_out, len(kept) - len(shown))


def not_suppressed(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """The numbers of boxes that overlap no better one of their class by more, best first; of equal ones the first is better."""
    order = scores.sort(descending=True, stable=True).indices
    boxes, labels = boxes[order], labels[order]
    kept = []
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().flatten()
        falling = torch.arange(len(own), 0, -1, device=boxes.device).to(boxes.dtype)  # distinct, in the order that they have
        kept.append(own[nms(boxes[own], falling, overlap)])
    if not kept:
        return order
    return order[torch.cat(kept).sort().values]


def clipped(boxes: Tensor, size: Size) -> Tensor:
    limits = boxes.new_tensor([size[1], size[0], size[1], size[0]])
    return torch.minimum(boxes.clamp(min=0), limits)
