"""Metrics that a recipe lists by a short name, as `f1` or `dice_cases`, for each kind of labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from widefield.tasks._cases import CaseMetric, CaseOverlap, SurfaceDistance
from widefield.tasks._counts import SCORES, ConfusionScore, LabelCounts
from widefield.tasks._feature_distances import FrechetDistance, KernelDistance
from widefield.tasks._sliced_wasserstein import SlicedWasserstein


class RankedScore(Metric):
    """The area under a curve of each class against the others, from the answers of all samples, which ranks gather.

    auc: under the ROC curve; average_precision: of the precision-recall curve.  NaN for a class that all or no samples have.
    """

    full_state_update = False
    answers: list[Tensor]
    target: list[Tensor]

    def __init__(self, score: str) -> None:
        super().__init__(sync_on_compute=False)
        self.score = score
        self.add_state("answers", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(self, answers: Tensor, target: Tensor) -> None:
        self.answers.append(answers.double())
        self.target.append(target)

    def compute(self) -> Tensor:
        from sklearn.metrics import average_precision_score, roc_auc_score  # imported late, as it takes a second

        answers, target = (torch.cat(parts).cpu().numpy() for parts in (self.answers, self.target))
        truth = _of_each(target, answers.shape[1])
        area = roc_auc_score if self.score == "auc" else average_precision_score
        pairs = zip(truth.T, answers.T, strict=True)
        return torch.tensor([area(one, p) if 0 < one.sum() < len(one) else np.nan for one, p in pairs], dtype=torch.float64)


def _of_each(target: Any, classes: int) -> Any:
    """(N, classes) of bool from (N,) class numbers or (N, classes) of 0 and 1."""
    return target > 0 if target.ndim == 2 else target[:, None] == np.arange(classes)


def _top(k: int = 3, *, num_classes: int) -> Metric:
    if not 1 <= k <= num_classes:
        raise ValueError(f"k is {k} and there are {num_classes} classes; take a number from 1 to {num_classes}")
    return MulticlassAccuracy(num_classes, top_k=k, average="micro", validate_args=False)


def _confused(score: str, num_classes: int, ignore_index: int | None = None) -> Metric:
    return ConfusionScore(score, num_classes, ignore_index)


def _counted(score: str, num_classes: int) -> Metric:
    return LabelCounts(num_classes, score)


_RANKED: dict[str, Callable[..., Metric]] = {score: partial(RankedScore, score) for score in ("auc", "average_precision")}
_CONFUSED = {score: partial(_confused, score) for score in (*SCORES, "balanced_accuracy", "kappa")}
_COUNTED = {score: partial(_counted, score) for score in SCORES}
NAMED: dict[str, dict[str, Callable[..., Metric]]] = {
    "class": {"top": _top, **_CONFUSED, **_RANKED},
    "classes": {**_COUNTED, **_RANKED},
    "pixels": _CONFUSED,
    "layers": _COUNTED,
    "values": {},
    "image": {},
    "boxes": {},
    "views": {},
    "noise": {},
}
"""By kind of labels and name, what makes the metric: it gets num_classes and ignore_index where it takes them."""

_OF_PIXELS: dict[str, Callable[..., CaseMetric]] = {
    "dice_cases": partial(CaseOverlap, "dice"),
    "iou_cases": partial(CaseOverlap, "iou"),
    "surface": SurfaceDistance,
}
_OF_IMAGES: dict[str, Callable[..., CaseMetric]] = {"swd": SlicedWasserstein, "fid": FrechetDistance, "kid": KernelDistance}
CASES_OF: dict[str, dict[str, Callable[..., CaseMetric]]] = {
    "pixels": _OF_PIXELS,
    "layers": _OF_PIXELS,
    "image": _OF_IMAGES,
    "noise": _OF_IMAGES,
}
"""By kind of labels, metrics that have a row of a table per case; each gets CaseSizes."""


def names_of(labels: str) -> list[str]:
    """The short names for a kind of labels."""
    return [*NAMED.get(labels, {}), *CASES_OF.get(labels, {})]
