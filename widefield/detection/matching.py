"""Which box does each anchor learn?  Exactly as from the table of all boxes and all anchors, which is never made at once.

An image of 20,480 px has 10^8 anchors and the table 10^11 numbers.  So anchors come in pieces; what needs all of them, the best
anchor of each box, is found in a first pass over the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torchvision.ops import box_iou

BACKGROUND, BETWEEN = -1, -2
_ENTRIES = 2**24
"""Of the table, at a time."""


def matched_by_overlap(
    boxes: Tensor, levels: Sequence[Tensor], *, below: float, above: float, rescues: bool = True
) -> list[Tensor]:
    """Of each level's anchors (n, 4) the number (n,) of the box (N, 4) that overlaps most, BACKGROUND or BETWEEN (not learned).

    below, above: an IoU below the first is background, one from the second on is the box.  An anchor with the largest IoU that
    a box has with any anchor learns in any case the box that it overlaps most itself, as torchvision's Matcher has it, unless
    `rescues` is false.
    """
    found = [torch.full((len(anchors),), BACKGROUND, device=boxes.device) for anchors in levels]
    if not len(boxes):
        return found
    pieces = [(number, piece) for number, anchors in enumerate(levels) for piece in _pieces(len(anchors), len(boxes))]
    best = boxes.new_zeros(len(pieces), len(boxes))
    numbers = []
    for row, (number, piece) in enumerate(pieces):
        overlap = box_iou(boxes, levels[number][piece])
        most, which = overlap.max(0)
        which_kept = torch.where(most < below, BACKGROUND, torch.where(most < above, BETWEEN, which))
        best[row], found[number][piece] = overlap.max(1).values, which_kept
        numbers.append(which)
    largest = best.max(0).values
    for row, (number, piece) in enumerate(pieces if rescues else []):
        if not ((best[row] == largest) & (largest > 0)).any():
            continue
        overlap = box_iou(boxes, levels[number][piece])
        is_best = ((overlap == largest[:, None]) & (largest > 0)[:, None]).any(0)
        found[number][piece] = torch.where(is_best, numbers[row], found[number][piece])
    return found


def matched_with_best(boxes: Tensor, levels: Sequence[Tensor], *, above: float) -> list[Tensor]:
    """As `matched_by_overlap` with one limit, but that each box has its best anchor (SSD, Liu et al. 2016, arXiv:1512.02325).

    Of equal anchors it is the first one; of boxes with the same best anchor the last one has it: torchvision's SSDMatcher.
    """
    found = matched_by_overlap(boxes, levels, below=above, above=above, rescues=False)
    starts = [0, *torch.tensor([len(anchors) for anchors in levels]).cumsum(0).tolist()]
    largest = boxes.new_zeros(len(boxes))
    place = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    for number, anchors in enumerate(levels if len(boxes) else []):
        for piece in _pieces(len(anchors), len(boxes)):
            most, which = box_iou(boxes, anchors[piece]).max(1)
            place = torch.where(most > largest, which + starts[number] + piece.start, place)
            largest = torch.maximum(most, largest)
    joined = torch.cat(found)
    for box in (largest > 0).nonzero().flatten().tolist():
        joined[place[box]] = box
    return list(joined.split([len(anchors) for anchors in levels]))


def matched_by_center(boxes: Tensor, levels: Sequence[Tensor], *, radius: float) -> list[Tensor]:
    """Of each level's anchors (n, 4), one per place, the number (n,) of the smallest box (N, 4) that they learn, or BACKGROUND.

    An anchor's center must be in the box, within `radius` anchors of its center, and the box's farthest side be 4 to 8 anchors
    away; less on the first level, more on the last (FCOS).
    """
    found = [torch.full((len(anchors),), BACKGROUND, device=boxes.device) for anchors in levels]
    for number, anchors in enumerate(levels if len(boxes) else []):
        reach = (0.0 if number == 0 else 4.0, float("inf") if number == len(levels) - 1 else 8.0)
        for piece in _pieces(len(anchors), len(boxes)):
            found[number][piece] = _smallest(boxes, anchors[piece], radius, reach)
    return found


def _smallest(boxes: Tensor, anchors: Tensor, radius: float, reach: tuple[float, float]) -> Tensor:
    points, sizes = (anchors[:, :2] + anchors[:, 2:]) / 2, (anchors[:, 2] - anchors[:, 0])[:, None]
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    near = (points[:, None] - centers[None]).abs().amax(2) < radius * sizes
    to_sides = torch.cat([points[:, None] - boxes[None, :, :2], boxes[None, :, 2:] - points[:, None]], dim=2)
    farthest = to_sides.amax(2)
    fits = near & (to_sides.amin(2) > 0) & (farthest > reach[0] * sizes) & (farthest < reach[1] * sizes)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    least, which = torch.where(fits, area, torch.inf).min(1)
    return torch.where(least.isinf(), BACKGROUND, which)


def _pieces(anchors: int, boxes: int) -> Iterator[slice]:
    step = max(1, _ENTRIES // max(1, boxes))
    return (slice(start, min(start + step, anchors)) for start in range(0, anchors, step))
