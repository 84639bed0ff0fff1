"""What maps of features show in boxes: from each box's level, 7 x 7 or so values, each the mean of points between places.

As torchvision's MultiScaleRoIAlign (He et al. 2017, arXiv:1703.06870), on whole maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import roi_align

CANONICAL_PX, CANONICAL_LEVEL = 224, 4
"""A box of 224 x 224 px is looked at on the level of stride 2^4; of half the side, on the one before (Lin et al. 2017)."""


@dataclass(frozen=True)
class RegionPooling:
    """strides: of the levels that boxes are looked at on, powers of two.  side: values along each side of a box.  points: along
    each side of a value."""

    strides: tuple[int, ...]
    side: int = 7
    points: int = 2

    def levels_of(self, boxes: Tensor) -> Tensor:
        """(N,) the number of each box's level."""
        sides = boxes[:, 2:] - boxes[:, :2]
        least, most = (round(math.log2(stride)) for stride in (self.strides[0], self.strides[-1]))
        level = torch.floor(CANONICAL_LEVEL + torch.log2(sides.prod(1).sqrt() / CANONICAL_PX) + 1e-6)
        return level.clamp(min=least, max=most).long() - least

    def pooled(self, maps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """(N, C, side, side) of all boxes.  maps: (B, C, rows, columns) of each level.  boxes: (n, 4) of each image."""
        all_boxes = torch.cat(list(boxes))
        images = torch.cat([torch.full_like(own[:, :1], row) for row, own in enumerate(boxes)])
        regions, level = torch.cat([images, all_boxes], dim=1), self.levels_of(all_boxes)
        found = maps[0].new_zeros(len(regions), maps[0].shape[1], self.side, self.side)
        for number, (one, stride) in enumerate(zip(maps, self.strides, strict=True)):
            own = (level == number).nonzero().flatten()
            values = roi_align(one, regions[own].to(one), self.side, spatial_scale=1 / stride, sampling_ratio=self.points)
            found = found.index_put((own,), values)
        return found
