"""Are the scores pycocotools' own, in whatever order and over however many ranks boxes come?"""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import pytest
import torch
from ranks import on_ranks

from widefield.comm.mesh import Mesh
from widefield.detection.coco_scores import coco_scores, coco_tree
from widefield.detection.selection import FoundBoxes, Limits
from widefield.detection.targets import boxes_in, rows_of, stacked
from widefield.plans import Plan
from widefield.tasks.detection import AveragePrecision
from widefield.training.metric_states import merge_states

CLASSES, IMAGES, SIZE = 4, 11, (300, 400)
LIMITS = Limits(0.05, 0.5, 1000, 100)


def example() -> tuple[list[FoundBoxes], torch.Tensor]:
    """What is found in images, with scores that tie, and the truth: images without boxes, without answers, and with crowds."""
    torch.manual_seed(0)
    found, rows = [], []
    for number in range(IMAGES):
        count = 0 if number in (2, 7) else 3 + number
        start = torch.rand(count, 2, dtype=torch.float64) * torch.tensor([300.0, 200])
        sides = 4 + torch.rand(count, 2, dtype=torch.float64) ** 3 * torch.tensor([100.0, 100])
        boxes = torch.cat([start, start + sides], dim=1)
        labels = torch.randint(CLASSES - 1, (count,))  # the last class is nowhere in the truth
        crowd = torch.rand(count) < 0.2
        rows.append(rows_of(boxes, labels, crowd=crowd, area=0.7 * (sides[:, 0] * sides[:, 1])))
        near = boxes.repeat(3, 1) + 1.5 * torch.randn(3 * count, 4, dtype=torch.float64)
        near[:, 2:] = torch.maximum(near[:, 2:], near[:, :2] + 1)
        kept = 0 if number == 4 else 3 * count
        named = torch.where(torch.rand(3 * count) < 0.2, torch.randint(CLASSES, (3 * count,)), labels.repeat(3))
        scores = (torch.rand(3 * count, dtype=torch.float64) * 8).round() / 8  # many are equal
        order = scores.sort(descending=True, stable=True).indices[:kept]
        found.append(FoundBoxes(near[order], scores[order], named[order]))
    return found, stacked(rows, [SIZE] * IMAGES)


def pycocotools_scores(found: list[FoundBoxes], target: torch.Tensor) -> tuple[list[float], np.ndarray]:
    """COCO's twelve numbers, and the precision of each class."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = torch.cat([numbered(number, rows_of(one.boxes, one.labels, crowd=one.crowd, area=one.area))
                       for number, one in enumerate(boxes_in(target))])  # fmt: skip
    answers = [
        {"image_id": number, "category_id": int(label), "score": float(score),
         "bbox": [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]}
        for number, one in enumerate(found) for box, score, label in zip(one.boxes, one.scores, one.labels, strict=True)
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = coco_tree(truth, torch.arange(len(target)), CLASSES)
        known.createIndex()
        evaluated = COCOeval(known, known.loadRes(answers), "bbox")
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
    return evaluated.stats.tolist(), evaluated.eval["precision"][..., 0, -1]


def numbered(number: int, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows.new_full((len(rows), 1), number), rows], dim=1)


def checked(values: dict[str, torch.Tensor]) -> None:
    found, target = example()
    stats, precision = pycocotools_scores(found, target)
    names = ["map", "map50", "map75", "map_small", "map_medium", "map_large"]
    for name, wanted in zip(names, stats, strict=False):
        value = float(values[name])
        assert (math.isnan(value) and wanted == -1) or value == pytest.approx(wanted, rel=1e-12, abs=1e-12), name
    assert float(values["mar"]) == pytest.approx(stats[8], rel=1e-12) and 0.1 < stats[0] < 0.9
    for k in range(CLASSES):
        of_class = precision[:, :, k][precision[:, :, k] > -1]
        wanted = float(of_class.mean()) if of_class.size else math.nan
        assert float(values["ap"][k]) == pytest.approx(wanted, rel=1e-12, nan_ok=True)
        curve = np.where(precision[0, :, k] > -1, precision[0, :, k], math.nan)
        assert values["precision_by_recall"][k].tolist() == pytest.approx(curve.tolist(), rel=1e-12, nan_ok=True)


def test_the_scores_are_pycocotools():
    metric, (found, target) = AveragePrecision(CLASSES, LIMITS), example()
    metric.update(torch.arange(IMAGES), found, target)
    checked(metric.compute())


def of_ranks(mesh: Mesh, shares: list[list[int]]) -> dict[str, torch.Tensor]:
    """Each rank updates with its share of the images, one after the other."""
    metric, (found, target) = AveragePrecision(CLASSES, LIMITS), example()
    for number in shares[mesh.rank]:
        metric.update(torch.tensor([number]), [found[number]], target[number : number + 1])
    merge_states(metric, mesh)
    return metric.compute()


@pytest.mark.parametrize(
    "shares",
    [[[0, 3, 1, 8, 10, 2, 4, 5], [9, 7, 6]], [list(range(10, -1, -1)), [], []], [[4], [2, 7], [9, 8, 10, 6, 5, 3, 1, 0]]],
)
def test_the_scores_of_ranks_with_unequal_shares_are_pycocotools(shares):
    """One has no image at all, one only images without boxes."""
    for values in on_ranks(len(shares), of_ranks, shares, plan=Plan(replicate=len(shares))):
        checked(values)


def test_without_boxes_to_find_there_is_no_score_and_without_answers_it_is_0():
    nothing, one = torch.zeros(0, 7), torch.zeros(0, 8)
    truth = numbered(3, rows_of([[0, 0, 9, 9]], [1]))
    empty = coco_scores(nothing, one, torch.tensor([0, 3]), classes=2, most=100)
    assert math.isnan(float(empty["map"])) and empty["boxes"].tolist() == [0, 0]
    missed = coco_scores(nothing, truth, torch.tensor([0, 3]), classes=2, most=100)
    assert float(missed["map"]) == 0 and missed["boxes"].tolist() == [0, 1]


def test_more_than_a_hundred_boxes_of_a_large_image_count():
    """COCO's limit of 100 boxes per image is one for a megapixel."""
    boxes = [[10.0 * k, 0, 10.0 * k + 8, 8] for k in range(200)]
    found = FoundBoxes(torch.tensor(boxes).double(), torch.linspace(0.9, 0.1, 200), torch.zeros(200, dtype=torch.int64))
    for size, wanted in (((1000, 1000), 0.5), ((2000, 1000), 1.0)):
        metric = AveragePrecision(1, LIMITS)
        metric.update(torch.tensor([0]), [found], stacked([rows_of(boxes, [0] * 200)], [size]))
        assert float(metric.compute()["mar"]) == pytest.approx(wanted)
