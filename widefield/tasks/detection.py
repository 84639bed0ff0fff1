"""Boxes with classes: RetinaNet's or FCOS's losses of whole images, and COCO's mean average precision.

The model gives a list of levels, each a tuple of maps, see `Detection`.  Wherever images are cut, these maps are gathered for
anchors, matching, losses and what is found, which are then those of one device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from widefield.config.field_types import Labels
from widefield.detection.anchor_heads import AnchorHeads, BoxLoss
from widefield.detection.anchors import MapLevels, Size
from widefield.detection.coco_scores import coco_scores
from widefield.detection.point_heads import PointHeads
from widefield.detection.selection import FoundBoxes, Limits, found_in
from widefield.detection.targets import boxes_in, rows_of, sizes_in, stacked
from widefield.tasks._torchmetrics import Metric, MetricCollection

Method = Literal["retinanet", "fcos"]
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

    The output is a list of levels: `heads.channels` says how many channels each map of a level has, `heads.levels` how many
    rows and columns.
    """

    num_classes: int
    heads: AnchorHeads | PointHeads
    limits: Limits
    headline: str = "map"
    higher_is_better: bool = True
    labels: Labels = "boxes"
    counts_images: bool = True

    @property
    def sums(self) -> Any:
        """Of FCOS, whose loss divides by what the whole batch learns; None of RetinaNet, whose loss is one of images."""
        heads = self.heads
        return (
            (lambda output, target: heads.sums(self.fitting(output, target), target)) if isinstance(heads, PointHeads) else None
        )

    @property
    def finish(self) -> Any:
        return self.heads.finish if isinstance(self.heads, PointHeads) else None

    def loss_sum(self, output: Levels, target: Tensor) -> Tensor:
        if isinstance(self.heads, PointHeads):
            return self.heads.finish(self.heads.sums(self.fitting(output, target), target)) * len(target)
        return self.heads.losses(self.fitting(output, target), target).sum()

    def count(self, target: Tensor) -> int:
        return len(target)

    def loss_each(self, output: Levels, target: Tensor) -> Tensor:
        rows = [[[one[row : row + 1] for one in level] for level in output] for row in range(len(target))]
        return torch.stack([self.loss_sum(own, target[row : row + 1]) for row, own in enumerate(rows)])

    def metrics(self) -> MetricCollection:
        _check_installed()
        precision = AveragePrecision(self.num_classes, self.limits)
        return MetricCollection({"coco": precision}, compute_groups=False)

    def answers(self, output: Levels) -> Tensor:
        raise AssertionError("what is found depends on the images' sizes: see `found`")

    def found(self, output: Levels, sizes: Sequence[Size]) -> list[FoundBoxes]:
        """What is found in each image of a batch.  sizes: (H, W) of each."""
        output = self._checked(output, len(sizes), sizes[0])
        return [
            found_in(self.heads, [[one[row] for one in level] for level in output], size, self.limits)
            for row, size in enumerate(sizes)
        ]

    def gathered_bytes(self, size: Size, *, images: int, itemsize: int) -> int:
        """Of the maps of all levels of so many images of `size`."""
        places = sum(math.prod(one) for one in self.heads.levels.maps_of(size))
        return images * places * sum(self.heads.channels) * itemsize

    def sentence(self, values: dict[str, float]) -> str:
        capped = f", limits left boxes out of {values['capped']:.3g} % of the images" if values["capped"] else ""
        return f"mAP {values['map']:.1f} %, mAP50 {values['map50']:.1f} %{capped}"

    def fitting(self, output: Any, target: Tensor) -> Levels:
        """The output, checked against the target.  ValueError: it does not fit."""
        return self._checked(output, len(target), sizes_in(target)[0])

    def _checked(self, output: Any, images: int, size: Size) -> Levels:
        maps, got = self.heads.levels.maps_of(size), _shapes_of(output)
        wanted = [[(images, channels, *one) for channels in self.heads.channels] for one in maps]
        if got == wanted:
            return output
        pairs = enumerate(zip(wanted, got, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(wanted), len(got)))
        shown = [str(levels[place]) if place < len(levels) else "none" for levels in (wanted, got)]
        raise ValueError(
            f"of {images} images of {size[0]} x {size[1]} px the task wants {len(wanted)} levels, at {place} maps "
            f"of {shown[0]} and the model gives {len(got)}, there {shown[1]}; give both the same strides, anchors and classes: "
            f"task.options.strides={list(self.heads.levels.strides)}, {self.num_classes} classes"
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


def build(
    num_classes: int,
    *,
    method: Method = "retinanet",
    strides: Sequence[int] = (8, 16, 32, 64, 128),
    anchor_scale: float = 4.0,
    octaves: int = 3,
    ratios: Sequence[float] = (0.5, 1.0, 2.0),
    overlap: Sequence[float] = (0.4, 0.5),
    radius: float = 1.5,
    alpha: float = 0.25,
    gamma: float = 2.0,
    box_loss: BoxLoss = "l1",
    torchvision_anchors: bool = False,
    score: float | None = None,
    suppress: float | None = None,
    candidates: int = 1000,
    detections: int = 100,
) -> Detection:
    """method: retinanet, heads with anchors, or fcos, without.  strides: pixels of the image per place, of each level.

    Of retinanet: anchor_scale, the side of the smallest anchor in strides; octaves, how many sizes, up to twice that; ratios,
    of height to width; overlap, below which IoU an anchor is background, and from which it learns a box; box_loss, `l1`,
    `smooth_l1` or `giou`.  Of fcos: radius, in strides, about a box's center, in which places learn it. alpha, gamma: of the
    focal loss.  torchvision_anchors: places lie `image // map` apart, as in torchvision, and not a stride. score: the least of
    what is found (0.05, of fcos 0.2).  suppress: the largest IoU of two boxes of one class (0.5, of fcos 0.6).  candidates: the
    most of a level, and detections: of an image, both per megapixel, and for smaller images as for one. ValueError: options out
    of range.
    """
    least, most = {"retinanet": (0.05, 0.5), "fcos": (0.2, 0.6)}.get(method, (0.0, 0.0))
    limits = Limits(least if score is None else score, most if suppress is None else suppress, candidates, detections)
    _check(method, strides, octaves, ratios, overlap, box_loss, limits)
    levels = MapLevels(tuple(strides), torchvision_anchors)
    if method == "fcos":
        return Detection(num_classes, PointHeads(num_classes, levels, radius, alpha, gamma), limits)
    sizes = tuple(tuple(int(anchor_scale * stride * 2 ** (part / octaves)) for part in range(octaves)) for stride in strides)
    shares = {"below": float(overlap[0]), "above": float(overlap[1]), "alpha": alpha, "gamma": gamma}
    heads = AnchorHeads(num_classes, levels, sizes, tuple(map(float, ratios)), **shares, box_loss=box_loss)
    return Detection(num_classes, heads, limits)


def _check(method: str, strides: Any, octaves: Any, ratios: Any, overlap: Any, box_loss: str, limits: Limits) -> None:
    """ValueError: options out of range."""
    counts = [limits.candidates, limits.detections]
    rules: list[tuple[bool, str]] = [
        (method in get_args(Method), f"method is {method!r}; retinanet or fcos is wanted, others have losses of other kinds"),
        (_all(strides, lambda one: type(one) is int and one > 0) and sorted(set(strides)) == list(strides),
         f"strides is {strides!r}; whole numbers that rise are wanted, one of each level"),
        (type(octaves) is int and octaves > 0, f"octaves is {octaves!r}; a whole number of 1 or more is wanted"),
        (_all(ratios, lambda one: one > 0), f"ratios is {ratios!r}; numbers above 0 are wanted"),
        (len(overlap) == 2 and 0 <= overlap[0] <= overlap[1] <= 1,
         f"overlap is {overlap!r}; two rising numbers from 0 to 1 are wanted"),
        (box_loss in get_args(BoxLoss), f"box_loss is {box_loss!r}; {', '.join(get_args(BoxLoss))} are there"),
        (_all([limits.score, limits.overlap], lambda one: 0 <= one <= 1),
         f"score is {limits.score!r} and suppress {limits.overlap!r}; shares from 0 to 1 are wanted"),
        (_all(counts, lambda one: type(one) is int and one > 0),
         f"candidates is {counts[0]!r} and detections {counts[1]!r}; whole numbers of 1 or more are wanted"),
    ]  # fmt: skip
    told = next((what for is_right, what in rules if not is_right), None)
    if told is not None:
        raise ValueError(f"task.options.{told}")


def _all(values: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(map(is_right, values))


_TARGET = stacked([rows_of([[0, 0, 8, 8]], [1]), rows_of([], [])], [(16, 16), (16, 16)])
_LOGITS = torch.full((2, 2, 2, 2), -9.0)
_LOGITS[0, 1, 0, 0] = 2.0

CASES = [
    (build(2, strides=[8], anchor_scale=2.0, octaves=1, ratios=[1.0]), [(_LOGITS, torch.zeros(2, 4, 2, 2))], _TARGET,
     {"map": 1.0, "map50": 1.0, "capped": 0.0}),
]  # fmt: skip
"""As in classification; the anchor of the first place, cut to the image, is the box."""
