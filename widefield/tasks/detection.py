"""Boxes with classes: losses of RetinaNet, FCOS, SSD or Faster R-CNN of whole images, and COCO's mean average precision.

The model gives a list of levels, each a tuple of maps, see `Detection`.  Wherever images are cut, these maps are gathered for
anchors, matching, losses and what is found, which are then those of one device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.config.field_types import Labels
from widefield.detection.anchor_heads import AnchorHeads
from widefield.detection.anchors import Size
from widefield.detection.coco_scores import coco_scores
from widefield.detection.default_box_heads import DefaultBoxHeads
from widefield.detection.region_heads import RegionHeads, Stage
from widefield.detection.regions import StagedOutput
from widefield.detection.sampling import ImageDraws
from widefield.detection.selection import FoundBoxes, Limits, found_in
from widefield.detection.targets import boxes_in, rows_of, sizes_in, stacked
from widefield.tasks._detectors import DetectorOptions, Heads, heads_of
from widefield.tasks._torchmetrics import Metric, MetricCollection

Levels = Sequence[Sequence[Tensor]]


class AveragePrecision(Metric):
    """COCO's scores from the boxes of all images, which ranks gather; see detection/coco_scores.py.

    capped: the share of images of which a limit left boxes out.
    """

    full_state_update = False
    higher_is_better = True
    found: list[Tensor]
    truth: list[Tensor]
    images: list[Tensor]

    def __init__(self, classes: int, limits: Limits) -> None:
        super().__init__(sync_on_compute=False)
        self.classes, self.limits = classes, limits
        for name in ("found", "truth", "images"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, index: Tensor, found: Sequence[FoundBoxes], target: Tensor) -> None:
        """Add images number `index` (B,).  target: a batch of boxes."""
        for number, answer, truth in zip(index.tolist(), found, boxes_in(target), strict=True):
            columns = [answer.boxes.double(), answer.scores.double()[:, None], answer.labels.double()[:, None]]
            self.found.append(_with_number(number, torch.cat(columns, dim=1)))
            rows = rows_of(truth.boxes.cpu(), truth.labels.cpu(), crowd=truth.crowd.cpu(), area=truth.area.cpu())
            self.truth.append(_with_number(number, rows))
            cut = answer.cut_candidates + answer.cut_detections > 0
            self.images.append(torch.tensor([[number, int(cut), self.limits.most(self.limits.detections, truth.size)]]))

    def compute(self) -> dict[str, Tensor]:
        found, truth, images = (torch.cat([one.cpu() for one in rows]) for rows in (self.found, self.truth, self.images))
        most = int(images[:, 2].max())
        scores = coco_scores(found, truth, images[:, 0], classes=self.classes, most=most)
        return scores | {"capped": images[:, 1].double().mean()}


def _with_number(number: int, rows: Tensor) -> Tensor:
    return torch.cat([rows.new_full((len(rows), 1), number), rows], dim=1)


@dataclass(frozen=True)
class Detection:
    """Targets are batches of boxes, see widefield/detection/targets.py.

    The output is a list of levels: `heads.level_channels` says how many channels each map of each level has, `heads.levels` how
    many rows and columns, but of ssd, whose maps may have any.  Of two stages it is what `completed` makes of that.
    """

    num_classes: int
    heads: Heads
    limits: Limits
    headline: str = "map"
    higher_is_better: bool = True
    labels: Labels = "boxes"
    counts_images: bool = True

    @property
    def stages(self) -> Sequence[str]:
        """Of two stages, the names of the modules of the model that have them: the first one's forward is the model's."""
        return ("maps", "roi_heads") if isinstance(self.heads, RegionHeads) else ()

    def completed(
        self,
        output: Levels,
        stage: Stage,
        sizes: Sequence[Size],
        *,
        target: Tensor | None = None,
        seeds: Sequence[int] = (),
        trains: bool = False,
    ) -> StagedOutput:
        """What the model of two stages gives for images of these (H, W), from the maps of the first.

        stage: the second one.  target: for losses; seeds: of each image, for what is drawn.  trains: no boxes are looked for.
        """
        assert isinstance(self.heads, RegionHeads), "the task has two stages"
        levels = self._checked(output, len(sizes), sizes[0])
        learned = None if target is None else [one.learned for one in boxes_in(target)]
        draws = [ImageDraws(seed) for seed in seeds]
        return self.heads.regions(levels, stage, sizes, learned=learned, draws=draws, trains=trains)

    @property
    def sums(self) -> Any:
        """Of all but RetinaNet, whose loss is one of images and not of what the whole batch learns."""
        heads = self.heads
        if isinstance(heads, AnchorHeads):
            return None
        if isinstance(heads, RegionHeads):
            return lambda output, target: heads.sums(output)
        return lambda output, target: heads.sums(self.fitting(output, target), target)

    @property
    def finish(self) -> Any:
        return None if isinstance(self.heads, AnchorHeads) else self.heads.finish

    def loss_sum(self, output: Any, target: Tensor) -> Tensor:
        if isinstance(self.heads, AnchorHeads):
            return self.heads.losses(self.fitting(output, target), target).sum()
        return self.finish(self.sums(output, target)) * len(target)

    def count(self, target: Tensor) -> int:
        return len(target)

    def loss_each(self, output: Any, target: Tensor) -> Tensor:
        rows = range(len(target))
        return torch.stack([self.loss_sum(_of_image(output, row), target[row : row + 1]) for row in rows])

    def metrics(self) -> MetricCollection:
        _check_installed()
        precision = AveragePrecision(self.num_classes, self.limits)
        return MetricCollection({"coco": precision}, compute_groups=False)

    def answers(self, output: Any) -> Tensor:
        raise AssertionError("what is found depends on the images' sizes: see `found`")

    def found(self, output: Any, sizes: Sequence[Size]) -> list[FoundBoxes]:
        """What is found in each image of a batch.  sizes: (H, W) of each."""
        heads = self.heads
        if isinstance(heads, RegionHeads):
            return [heads.found(output.of_image(row), size, self.limits) for row, size in enumerate(sizes)]
        output = self._checked(output, len(sizes), sizes[0])
        rows = [[[one[row] for one in level] for level in output] for row in range(len(sizes))]
        if isinstance(heads, DefaultBoxHeads):
            return [heads.found(own, size, self.limits) for own, size in zip(rows, sizes, strict=True)]
        return [found_in(heads, own, size, self.limits) for own, size in zip(rows, sizes, strict=True)]

    def gathered_bytes(self, size: Size, *, images: int, itemsize: int) -> int:
        """Of the maps of all levels of so many images of `size`, with a place for each stride, rounded up."""
        levels = zip(self.heads.levels.maps_of(size), self.heads.level_channels, strict=True)
        return images * itemsize * sum(math.prod(one) * sum(channels) for one, channels in levels)

    def sentence(self, values: dict[str, float]) -> str:
        capped = f", limits left boxes out of {values['capped']:.3g} % of the images" if values["capped"] else ""
        return f"mAP {values['map']:.1f} %, mAP50 {values['map50']:.1f} %{capped}"

    def fitting(self, output: Any, target: Tensor) -> Levels:
        """The output, checked against the target.  ValueError: it does not fit."""
        return self._checked(output, len(target), sizes_in(target)[0])

    def _checked(self, output: Any, images: int, size: Size) -> Levels:
        got = _shapes_of(output)
        maps: Sequence[Sequence[int]] = self.heads.levels.maps_of(size)
        if isinstance(self.heads, DefaultBoxHeads) and len(got) == len(maps):  # of any rows and columns, as its codes have
            maps = [(level or [()])[-1][2:] for level in got]
        levels = zip(maps, self.heads.level_channels, strict=True)
        wanted = [[(images, channels, *one) for channels in of_level] for one, of_level in levels]
        if got == wanted:
            return output
        pairs = enumerate(zip(wanted, got, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(wanted), len(got)))
        shown = [str(some[place]) if place < len(some) else "none" for some in (wanted, got)]
        raise ValueError(
            f"of {images} images of {size[0]} x {size[1]} px the task wants {len(wanted)} levels, at {place} maps "
            f"of {shown[0]} and the model gives {len(got)}, there {shown[1]}; give both the same strides, anchors and classes: "
            f"task.options.strides={list(self.heads.levels.strides)}, {self.num_classes} classes"
        )


def _of_image(output: Any, row: int) -> Any:
    """What the model gives for one image, still with its dim."""
    return (
        output.of_image(row)
        if isinstance(output, StagedOutput)
        else [[one[row : row + 1] for one in level] for level in output]
    )


def _shapes_of(output: Any) -> list[list[tuple[int, ...]]]:
    if not isinstance(output, list | tuple):
        return []
    return [[tuple(one.shape) for one in level] if isinstance(level, list | tuple) else [] for level in output]


def _check_installed() -> None:
    """ValueError: what evaluates is an extra that is not here."""
    if importlib.util.find_spec("faster_coco_eval") is None:
        raise ValueError(
            "task.name=detection evaluates with faster-coco-eval, which is not installed: pip install 'widefield[detection]'"
        )


def build(num_classes: int, **options: Any) -> Detection:
    """options: those of DetectorOptions.  ValueError: options out of range.  TypeError: an unknown one."""
    asked = DetectorOptions(**options)
    heads = heads_of(num_classes, asked)
    return Detection(num_classes, heads, asked.limits)


_TARGET = stacked([rows_of([[0, 0, 8, 8]], [1]), rows_of([], [])], [(16, 16), (16, 16)])
_LOGITS = torch.full((2, 2, 2, 2), -9.0)
_LOGITS[0, 1, 0, 0] = 2.0
_SSD_LOGITS = torch.zeros(2, 4 * 3, 2, 2)
_SSD_LOGITS[:, 0::3] = 9.0  # the background
_SSD_LOGITS[0, 2, 0, 0] = 20.0
_SSD_CODES = torch.zeros(2, 4 * 4, 2, 2)

CASES = [
    (build(2, strides=[8], anchor_scale=2.0, octaves=1, ratios=[1.0]), [(_LOGITS, torch.zeros(2, 4, 2, 2))], _TARGET,
     {"map": 1.0, "map50": 1.0, "capped": 0.0}),
    (build(2, method="ssd", strides=[8], scales=[0.5, 1.0], ratios=[[1]]), [(_SSD_LOGITS, _SSD_CODES)], _TARGET,
     {"map": 1.0, "map50": 1.0, "capped": 0.0}),
]  # fmt: skip
"""As in classification; the first anchor, or default box, of the first place, cut to the image, is the box."""
