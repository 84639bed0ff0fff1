"""Boxes as targets: one tensor for each image, and one for a batch of images that have different numbers of them.

An image's boxes are rows (N, 7) of float64: x1, y1, x2, y2, class number, crowd, area.  A crowd (1) is a region with objects
that nobody told apart, as in COCO: it is not learned, and what is found in it counts neither for nor against.  The area is of
the object, which may be smaller than its box; COCO's scores of small, medium and large objects go by it.

A batch is (B, 1 + most, 7).  Row 0 of each image is the image itself, (0, 0, W, H), with the class WHOLE; its boxes follow,
then rows of the class NOTHING.  So a batch of boxes is cut, moved and doubled by samples as any other target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COLUMNS = 7
WHOLE, NOTHING = -1, -2
_OUTSIDE_PX = 1.0
"""Boxes may reach so far out of their image, by rounding of whoever drew them; they are cut there."""


@dataclass(frozen=True)
class ImageBoxes:
    """The boxes of one image.  size: (H, W).  boxes: (N, 4).  labels: (N,) int64.  crowd: (N,) bool.  area: (N,)."""

    size: tuple[int, int]
    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    area: Tensor

    @property
    def learned(self) -> ImageBoxes:
        """Those that are no crowds."""
        one = ~self.crowd
        return ImageBoxes(self.size, self.boxes[one], self.labels[one], self.crowd[one], self.area[one])


def rows_of(boxes: Any, labels: Any, *, crowd: Any = None, area: Any = None) -> Tensor:
    """(N, 7) of boxes (N, 4) as x1, y1, x2, y2, and class numbers (N,).

    crowd: (N,) of 0 and 1; None: none is one.  area: (N,) in pixels; None: that of the boxes.
    """
    boxes = torch.as_tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    columns = [torch.as_tensor(labels, dtype=torch.float64).reshape(-1)]
    columns.append(torch.zeros(len(boxes), dtype=torch.float64) if crowd is None else torch.as_tensor(crowd).double())
    columns.append(areas(boxes) if area is None else torch.as_tensor(area, dtype=torch.float64))
    return torch.cat([boxes, torch.stack([column.reshape(-1) for column in columns], dim=1)], dim=1)


def areas(boxes: Tensor) -> Tensor:
    """(N,) of (N, 4)."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def stacked(rows: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]) -> Tensor:
    """(B, 1 + most, 7), see the top, from the rows (N, 7) of each image and its size (H, W)."""
    most = max(map(len, rows), default=0)
    batch = torch.zeros(len(rows), 1 + most, COLUMNS, dtype=torch.float64)
    batch[..., 4] = NOTHING
    for image, own, (height, width) in zip(batch, rows, sizes, strict=True):
        image[0] = torch.tensor([0, 0, width, height, WHOLE, 0, height * width], dtype=torch.float64)
        image[1 : 1 + len(own)] = own
    return batch


def boxes_in(target: Tensor) -> Iterator[ImageBoxes]:
    """The boxes of each image of a batch (B, 1 + most, 7)."""
    for (height, width), rows in zip(sizes_in(target), target, strict=True):
        own = rows[1:][rows[1:, 4] >= 0]
        yield ImageBoxes((height, width), own[:, :4], own[:, 4].long(), own[:, 5] > 0, own[:, 6])


def sizes_in(target: Tensor) -> list[tuple[int, int]]:
    """(H, W) of each image of a batch."""
    return [(int(height), int(width)) for width, height in target[:, 0, 2:4].tolist()]


def checked_rows(name: str, rows: Any, size: Sequence[int], classes: int) -> Tensor:
    """The rows (N, 7) of an image of `size`, cut to it.

    name: of the image, for the error.
    ValueError: another shape, a box without an area, outside of the image, or of no class.
    """
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != COLUMNS:
        got = f"a tensor of {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise ValueError(
            f"the boxes of {name} are {got}; rows (N, {COLUMNS}) are wanted, as widefield.detection.targets.rows_of makes them"
        )
    rows, (height, width) = rows.double(), size
    boxes, labels = rows[:, :4], rows[:, 4]
    limits = torch.tensor([width, height, width, height], dtype=torch.float64)
    wrong = [
        (~rows.isfinite().all(1), "has a number that is not finite"),
        ((boxes[:, 2:] <= boxes[:, :2]).any(1), "has no area: x2 must be above x1, and y2 above y1"),
        (((boxes < -_OUTSIDE_PX) | (boxes > limits + _OUTSIDE_PX)).any(1), f"is outside of its image of {height} x {width} px"),
        ((labels < 0) | (labels >= classes) | (labels != labels.round()), f"has a class outside of 0..{classes - 1}"),
    ]
    for where, why in wrong:
        if where.any():
            number = int(where.nonzero()[0])
            shown = ", ".join(f"{value:g}" for value in rows[number, :5].tolist())
            raise ValueError(
                f"box {number} of {name}, counted from 0, with x1, y1, x2, y2 and class {shown}, {why}; mend or remove it"
            )
    return torch.cat([torch.minimum(boxes.clamp(min=0), limits), rows[:, 4:]], dim=1)
