"""Heads with default boxes (SSD, Liu et al. 2016, arXiv:1512.02325): what their maps mean, and their losses.

Maps may have any number of places: those of an image divide it evenly, so boxes never drift.  Class 0 of the logits is the
background.  Of the default boxes that learn no box only the worst count, `negatives` times as many as learn one, image by
image.  All losses are added over a batch and divided by the number of default boxes that learn one in the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.detection.anchors import MapLevels, Size, values_of_places
from widefield.detection.coding import decoded, encoded
from widefield.detection.matching import matched_with_best
from widefield.detection.selection import FoundBoxes, Limits, found_of_classes
from widefield.detection.targets import ImageBoxes, boxes_in

_WEIGHTS = (10.0, 5.0)


@dataclass(frozen=True)
class DefaultBoxHeads:
    """Maps of each level: (B, A * (1 + classes), rows, columns) of logits, and (B, A * 4, rows, columns) of codes.

    A is 2 + 2 * the level's ratios.  scales: of each level and of one more, shares of the image's sides or, with `in_px`,
    pixels.  ratios: of each level.  steps: whether places lie a stride apart, as torchvision's SSD300 has it; else they divide
    the image.
    """

    classes: int
    levels: MapLevels
    scales: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]
    in_px: bool = False
    steps: bool = False
    above: float = 0.5
    negatives: float = 3.0

    @property
    def level_channels(self) -> list[tuple[int, ...]]:
        """Of each map of each level."""
        anchors = [2 + 2 * len(own) for own in self.ratios]
        return [(many * (1 + self.classes), many * 4) for many in anchors]

    def anchors_of(self, size: Size, output: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The default boxes (n, 4) of each level of an image of `size`.  output: maps, whose last two dims are their places."""
        scale = output[0][0].new_tensor([size[1], size[0]])
        found = []
        for number, (level, stride) in enumerate(zip(output, self.levels.strides, strict=True)):
            rows, columns = level[0].shape[-2:]
            of = (size[0] / stride, size[1] / stride) if self.steps else (rows, columns)
            y, x = torch.meshgrid(
                *((torch.arange(n) + 0.5) / by for n, by in zip((rows, columns), of, strict=True)), indexing="ij"
            )
            cell = self._cell(number, size).to(scale)
            centers = torch.stack([x, y], dim=-1).reshape(-1, 1, 2).to(scale)
            corners = [(centers + sign * 0.5 * cell) * scale for sign in (-1, 1)]
            found.append(torch.cat(corners, dim=-1).reshape(-1, 4))
        return found

    def _cell(self, level: int, size: Size) -> Tensor:
        """(A, 2) widths and heights at a place, as shares of the image's, in the order of torchvision's DefaultBoxGenerator."""
        own, after = self.scales[level : level + 2]
        between = math.sqrt(own * after)
        pairs = [[own, own], [between, between]]
        for ratio in self.ratios[level]:
            root = math.sqrt(ratio)
            pairs += [[own * root, own / root], [own / root, own * root]]
        shares = torch.tensor(pairs, dtype=torch.float32)
        if self.in_px:
            shares = shares / torch.tensor([size[1], size[0]])
        return shares.clamp(min=0, max=1)

    def sums(self, output: Sequence[Sequence[Tensor]], target: Tensor) -> Tensor:
        """(3,) over the batch: the losses of classes and of boxes, and the number of default boxes that learn one."""
        logits, codes = (
            torch.cat([values_of_places(level[part], values) for level in output], dim=1)
            for part, values in ((0, 1 + self.classes), (1, 4))
        )
        images = list(boxes_in(target))
        anchors = self.anchors_of(images[0].size, output)
        rows = zip(logits, codes, images, strict=True)
        return torch.stack([self._of_image(*row[:2], anchors, row[2].learned) for row in rows]).sum(0)

    def _of_image(self, logits: Tensor, codes: Tensor, levels: list[Tensor], image: ImageBoxes) -> Tensor:
        boxes = image.boxes.to(logits)
        matched, anchors = torch.cat(matched_with_best(boxes, levels, above=self.above)), torch.cat(levels)
        learns = matched >= 0
        wanted = torch.zeros_like(matched)
        wanted[learns] = 1 + image.labels[matched[learns]]
        of_class = F.cross_entropy(logits, wanted, reduction="none")
        others = of_class[~learns]
        worst = others.detach().sort(descending=True, stable=True).indices[: int(self.negatives * int(learns.sum()))]
        of_box = F.smooth_l1_loss(codes[learns], encoded(boxes[matched[learns]], anchors[learns], _WEIGHTS), reduction="sum")
        return torch.stack([of_class[learns].sum() + others[worst].sum(), of_box, learns.sum().to(logits.dtype)])

    def finish(self, sums: Tensor) -> Tensor:
        """The loss of the batch that has these sums."""
        return sums[:2].sum() / sums[2].clamp(min=1)

    def found(self, output: Sequence[Sequence[Tensor]], size: Size, limits: Limits) -> FoundBoxes:
        """What is found in one image of `size`, from its maps without the dim of images."""
        maps = [[one[None] for one in level] for level in output]
        logits = torch.cat([values_of_places(level[0], 1 + self.classes)[0] for level in maps])
        codes = torch.cat([values_of_places(level[1], 4)[0] for level in maps])
        boxes = decoded(codes, torch.cat(self.anchors_of(size, output)), _WEIGHTS)
        return found_of_classes(boxes, logits.softmax(1)[:, 1:], size, limits)
