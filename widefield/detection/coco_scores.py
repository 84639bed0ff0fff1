"""COCO's average precision of the boxes found in all images of a split, evaluated once, by faster-coco-eval.

The order of boxes with equal scores changes the numbers: rows are sorted by image, falling score and number within the image.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
_AREAS = ("all", "small", "medium", "large")


def coco_scores(found: Tensor, truth: Tensor, images: Tensor, *, classes: int, most: int) -> dict[str, Tensor]:
    """Shares from 0 to 1, NaN where there is no box to find.

    found: (M, 7) image, x1, y1, x2, y2, score, class.  truth: (N, 8) image and a row of targets.py.  images: (I,) the numbers
    of all images.  most: the boxes per image that count, the best ones; COCO's own number is 100.
    Returns map (the mean over IoUs from 0.5 to 0.95), map50, map75, map of small, medium and large objects (up to 32 and 96 px
    squared), mar (the mean largest recall), and of each class ap, (classes,), boxes, (classes,) int64 to find, and
    precision_by_recall, (classes, 101): at IoU 0.5, the highest at each recall of 0, 0.01 ... 1 or more.
    """
    scored = _scored(_sorted(found), truth, images, classes, most)
    precision, recall = scored["precision"], scored["recall"]  # (IoUs, recalls, classes, areas, limits), without `recalls`
    values = {"map": precision[..., 0, -1], "map50": precision[0, :, :, 0, -1], "map75": precision[5, :, :, 0, -1]}
    values |= {f"map_{area}": precision[..., number, -1] for number, area in enumerate(_AREAS) if number}
    values |= {"mar": recall[..., 0, -1]}
    counted = truth[truth[:, 6] == 0, 5].long()
    return {name: torch.tensor(_mean(of), dtype=torch.float64) for name, of in values.items()} | {
        "ap": torch.tensor([_mean(precision[:, :, k, 0, -1]) for k in range(classes)], dtype=torch.float64),
        "boxes": torch.bincount(counted, minlength=classes),
        "precision_by_recall": torch.from_numpy(np.where(precision > -1, precision, math.nan)[0, :, :, 0, -1].T.copy()),
    }


def _sorted(found: Tensor) -> Array:
    """Rows by image, then by falling score; those of one image and score keep their order."""
    rows = found.double().cpu().numpy()
    return rows[np.lexsort((np.arange(len(rows)), -rows[:, 5], rows[:, 0]))]


def _scored(found: Array, truth: Tensor, images: Tensor, classes: int, most: int) -> dict[str, Array]:
    """`precision` and `recall` of faster-coco-eval."""
    from faster_coco_eval import COCO, COCOeval_faster  # an extra, and imported late: it takes a second

    dataset = coco_tree(truth, images, classes)
    known = COCO(dataset, print_function=_silent)
    answers = known.loadRes([
        {"image_id": int(row[0]), "category_id": int(row[6]), "bbox": _xywh(row[1:5]), "score": float(row[5])} for row in found
    ])  # fmt: skip
    evaluated = COCOeval_faster(known, answers, iouType="bbox", print_function=_silent)
    evaluated.params.maxDets = [1, 10, max(most, 10)]
    evaluated.evaluate()
    evaluated.accumulate()
    return {name: evaluated.eval[name] for name in ("precision", "recall")}


def coco_tree(truth: Tensor, images: Tensor, classes: int) -> dict[str, Any]:
    """The truth as COCO's annotations have it; classes are numbers."""
    annotations = [
        {"id": number, "image_id": int(row[0]), "category_id": int(row[5]), "bbox": _xywh(row[1:5]), "iscrowd": int(row[6]),
         "area": float(row[7])}
        for number, row in enumerate(truth.double().cpu().numpy(), start=1)  # 0 is COCO's word for "none"
    ]  # fmt: skip
    numbers = sorted({int(image) for image in images.tolist()})
    return {
        "info": {}, "images": [{"id": number} for number in numbers], "annotations": annotations,
        "categories": [{"id": number, "name": str(number)} for number in range(classes)],
    }  # fmt: skip


def _xywh(box: Array) -> list[float]:
    x1, y1, x2, y2 = map(float, box)
    return [x1, y1, x2 - x1, y2 - y1]


def _mean(values: Array) -> float:
    """Of those that are numbers: -1 says that there was nothing to find."""
    known = values[values > -1]
    return float(known.mean()) if known.size else math.nan


def _silent(*_: Any) -> None:
    """What faster-coco-eval would print."""
