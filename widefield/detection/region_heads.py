"""Detectors of two stages (Faster R-CNN, Ren et al. 2015, arXiv:1506.01497): proposals from maps, then what they are.

The first stage's maps say of each anchor whether an object is there, and where.  The best places, without those that overlap
better ones, are the proposals.  The second stage, a network of the model's, sees what maps of features show in a box.  Losses
are of anchors and boxes that are drawn, image by image, and are divided by how many were drawn in the whole batch: so they are
sums, and the loss is finished from those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.detection.anchors import MapLevels, Size, anchors_of_levels, values_of_places
from widefield.detection.coding import decoded, encoded
from widefield.detection.matching import BACKGROUND, matched_by_overlap
from widefield.detection.region_pooling import RegionPooling
from widefield.detection.regions import AnchorsDrawn, Answered, Asked, StagedOutput
from widefield.detection.sampling import ImageDraws
from widefield.detection.selection import (
    FoundBoxes,
    Limits,
    clipped,
    found_of_classes,
    is_as_large,
    not_suppressed,
    scaled_to,
)
from widefield.detection.targets import ImageBoxes

Stage = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From (N, C, side, side) to logits (N, 1 + classes) and codes (N, (1 + classes) * 4)."""
_WEIGHTS = (10.0, 5.0)
_BETA = 1 / 9
_SMALLEST_PROPOSAL_PX, _SMALLEST_FOUND_PX = 1e-3, 1e-2


@dataclass(frozen=True)
class Proposals:
    """How many proposals there are: candidates of a level and proposals of an image, in training and else, for a megapixel.

    overlap: the largest IoU of two.
    """

    training: int = 2000
    otherwise: int = 1000
    overlap: float = 0.7


@dataclass(frozen=True)
class Drawn:
    """How many of an image count in a loss, for a megapixel; the most that learn a box; and the IoUs that say which these are.

    below, above: see `matched_by_overlap`.
    """

    most: int
    share: float
    below: float
    above: float


@dataclass(frozen=True)
class RegionHeads:
    """Maps of each level: (B, A, rows, columns) of logits, (B, A * 4, ...) of codes and (B, features, ...) of features.

    sizes: of each level's anchors, in pixels.  ratios: of height to width.
    """

    classes: int
    levels: MapLevels
    sizes: tuple[tuple[int, ...], ...]
    pooling: RegionPooling
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    features: int = 256
    proposals: Proposals = Proposals()
    of_anchors: Drawn = Drawn(256, 0.5, 0.3, 0.7)
    of_boxes: Drawn = Drawn(512, 0.25, 0.5, 0.5)

    @property
    def level_channels(self) -> list[tuple[int, ...]]:
        """Of each map of each level."""
        anchors = len(self.sizes[0]) * len(self.ratios)
        return [(anchors, anchors * 4, self.features)] * len(self.sizes)

    def regions(
        self,
        output: Sequence[Sequence[Tensor]],
        stage: Stage,
        sizes: Sequence[Size],
        *,
        learned: Sequence[ImageBoxes] | None,
        draws: Sequence[ImageDraws],
        trains: bool,
    ) -> StagedOutput:
        """Both stages of a batch of images of `sizes`.  The second one is called once, whatever is asked of it.

        learned: the boxes of each image, for losses; None: nobody knows them.  trains: nothing is to be found.
        """
        anchors = anchors_of_levels(self.levels, self.sizes, self.ratios, sizes[0], output[0][0])
        with torch.no_grad():
            proposed = [
                self._proposals([[one[row] for one in level[:2]] for level in output], anchors, size, trains=trains)
                for row, size in enumerate(sizes)
            ]
            drawn, of_anchors = list[Asked](), list[AnchorsDrawn]()
            for image, boxes, draw in zip(learned or [], proposed, draws, strict=learned is not None):
                of_anchors.append(self._drawn_anchors(anchors, image, draw))
                drawn.append(self._drawn_boxes(boxes, image, draw))
        asked = drawn if trains else [*drawn, *map(Asked, proposed)]
        answers = self._answers(output, stage, asked, images=len(sizes))
        told = None if learned is None else answers[: len(drawn)]
        return StagedOutput(output, told, of_anchors if drawn else None, None if trains else answers[len(drawn) :])

    # ------------------------------------------------------------------------------------------ the first stage

    def _proposals(self, maps: list[list[Tensor]], anchors: list[Tensor], size: Size, *, trains: bool) -> Tensor:
        """(n, 4) of one image, the best first."""
        most = scaled_to(self.proposals.training if trains else self.proposals.otherwise, size)
        boxes, scores, levels = [], [], []
        for number, ((logits, codes), own) in enumerate(zip(maps, anchors, strict=True)):
            objectness = values_of_places(logits[None], 1)[0, :, 0]
            best = objectness.sort(descending=True, stable=True).indices[:most]
            found = clipped(decoded(values_of_places(codes[None], 4)[0][best], own[best]), size)
            kept = is_as_large(found, _SMALLEST_PROPOSAL_PX)
            boxes.append(found[kept])
            scores.append(objectness[best][kept].sigmoid())
            levels.append(torch.full_like(best[kept], number))
        joined = torch.cat(boxes)
        return joined[not_suppressed(joined, torch.cat(scores), torch.cat(levels), self.proposals.overlap)[:most]]

    def _drawn_anchors(self, anchors: list[Tensor], image: ImageBoxes, draw: ImageDraws) -> AnchorsDrawn:
        asked, boxes = self.of_anchors, image.boxes.to(anchors[0])
        matched = torch.cat(matched_by_overlap(boxes, anchors, below=asked.below, above=asked.above))
        most = scaled_to(asked.most, image.size)
        learns, others = draw.balanced(matched >= 0, matched == BACKGROUND, most=most, share=asked.share)
        codes = encoded(boxes[matched[learns]], torch.cat(anchors)[learns])
        return AnchorsDrawn(learns, codes, others)

    # ------------------------------------------------------------------------------------------ the second stage

    def _drawn_boxes(self, proposed: Tensor, image: ImageBoxes, draw: ImageDraws) -> Asked:
        """Some of the proposals and of the image's own boxes, in their order."""
        asked, own = self.of_boxes, image.boxes.to(proposed)
        boxes = torch.cat([proposed, own])
        (matched,) = matched_by_overlap(own, [boxes], below=asked.below, above=asked.above, rescues=False)
        most = scaled_to(asked.most, image.size)
        parts = draw.balanced(matched >= 0, matched == BACKGROUND, most=most, share=asked.share)
        chosen = torch.cat(parts).sort().values
        which, learns = matched[chosen], matched[chosen] >= 0
        wanted, learned = torch.zeros_like(which), boxes[chosen].clone()
        wanted[learns], learned[learns] = 1 + image.labels[which[learns]], own[which[learns]]
        return Asked(boxes[chosen], wanted, learned)

    def _answers(self, output: Sequence[Sequence[Tensor]], stage: Stage, asked: list[Asked], *, images: int) -> list[Answered]:
        """asked: of each image in turn, perhaps twice."""
        maps = [level[2] for level in output[: len(self.pooling.strides)]]
        of_image = [torch.cat([one.boxes for one in asked[row::images]]) for row in range(images)]
        logits, codes = stage(self.pooling.pooled(maps, of_image))
        counts = [len(one.boxes) for row in range(images) for one in asked[row::images]]
        parts = list(zip(logits.split(counts), codes.split(counts), strict=True))
        each = len(asked) // images
        return [Answered(one, *parts[number % images * each + number // images]) for number, one in enumerate(asked)]

    # ------------------------------------------------------------------------------------------ losses, and what is found

    def sums(self, regions: StagedOutput) -> Tensor:
        """(6,) over the batch: the first stage's losses of logits and of codes, how many were drawn; and the second's."""
        assert regions.drawn is not None and regions.anchors is not None, "losses are asked for where boxes are known"
        logits, codes = (
            torch.cat([values_of_places(level[part], values) for level in regions.levels], dim=1)
            for part, values in ((0, 1), (1, 4))
        )
        first = map(self._of_anchors, logits[..., 0], codes, regions.anchors)
        return torch.cat([torch.stack(list(first)).sum(0), torch.stack(list(map(self._of_boxes, regions.drawn))).sum(0)])

    def _of_anchors(self, logits: Tensor, codes: Tensor, drawn: AnchorsDrawn) -> Tensor:
        own = logits[torch.cat([drawn.learns, drawn.others])]
        wanted = (torch.arange(len(own), device=own.device) < len(drawn.learns)).to(own)
        of_codes = F.smooth_l1_loss(codes[drawn.learns], drawn.codes, beta=_BETA, reduction="sum")
        of_logits = F.binary_cross_entropy_with_logits(own, wanted, reduction="sum")
        return torch.stack([of_logits, of_codes, own.new_tensor(len(own))])

    def _of_boxes(self, answered: Answered) -> Tensor:
        asked, logits = answered.asked, answered.logits
        assert asked.wanted is not None and asked.learned is not None, "drawn boxes have classes"
        learns = asked.wanted > 0
        codes = answered.codes.view(-1, 1 + self.classes, 4)[learns, asked.wanted[learns]]
        wanted = encoded(asked.learned[learns], asked.boxes[learns], _WEIGHTS)
        of_codes = F.smooth_l1_loss(codes, wanted, beta=_BETA, reduction="sum")
        of_logits = F.cross_entropy(logits, asked.wanted, reduction="sum")
        return torch.stack([of_logits, of_codes, logits.new_tensor(len(logits))])

    def found(self, regions: StagedOutput, size: Size, limits: Limits) -> FoundBoxes:
        """What is found in one image of `size`, of regions of this image alone."""
        assert regions.proposed is not None, "boxes are looked for where a model is evaluated"
        (one,) = regions.proposed
        each = 1 + self.classes
        boxes = decoded(one.codes.view(-1, 4), one.asked.boxes.repeat_interleave(each, dim=0), _WEIGHTS).view(-1, each, 4)
        return found_of_classes(boxes[:, 1:], one.logits.softmax(1)[:, 1:], size, limits, smallest_px=_SMALLEST_FOUND_PX)

    def finish(self, sums: Tensor) -> Tensor:
        """The loss of the batch that has these sums."""
        first, second = sums[:3], sums[3:]
        return first[:2].sum() / first[2].clamp(min=1) + second[:2].sum() / second[2].clamp(min=1)
