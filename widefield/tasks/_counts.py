"""Counts of right and wrong answers per class, and the scores that follow from them.

A class that is neither in the truth nor in the answers has no score (NaN) and is left out of means.  A class that is in one of
them has precision, recall and F1 of 0 where nothing is right, as in scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

SCORES = ("precision", "recall", "f1", "iou")


def scores_of(right: Tensor, answered: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Scores of each class from (K,) counts: answered right, answered at all, and true."""
    right, answered, truth = (counts.double() for counts in (right, answered, truth))
    either = answered + truth - right
    found = {
        "precision": right / answered.clamp(min=1),
        "recall": right / truth.clamp(min=1),
        "f1": 2 * right / (answered + truth).clamp(min=1),
        "iou": right / either.clamp(min=1),
    }
    return {name: torch.where(either > 0, values, torch.nan) for name, values in found.items()}


def kappa_of(confusion: Tensor) -> Tensor:
    """Cohen's kappa of a (truth, answer) matrix of counts; NaN where all are of one class, or there are none."""
    share = confusion.double() / confusion.sum()
    chance = (share.sum(0) * share.sum(1)).sum()
    return torch.where(chance < 1, (share.diag().sum() - chance) / (1 - chance), torch.nan)


def balanced_accuracy_of(confusion: Tensor) -> Tensor:
    """The mean recall of the classes in the truth."""
    truth = confusion.sum(1)
    return (confusion.diag().double() / truth)[truth > 0].mean()


class ConfusionScore(Metric):
    """One score from the confusion matrix of samples or pixels: of each class, or balanced_accuracy, or kappa."""

    full_state_update = False
    confusion: Tensor

    def __init__(self, score: str, num_classes: int, ignore_index: int | None = None) -> None:
        super().__init__(sync_on_compute=False)
        self.score, self.num_classes, self.ignore_index = score, num_classes, ignore_index
        self.add_state("confusion", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        numbers = answers.argmax(1) if answers.ndim > target.ndim else answers
        if self.ignore_index is not None:
            counted = target != self.ignore_index
            numbers, target = numbers[counted], target[counted]
        pairs = target.flatten() * self.num_classes + numbers.flatten()
        self.confusion += torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.confusion)

    def compute(self) -> Tensor:
        if self.score == "kappa":
            return kappa_of(self.confusion)
        if self.score == "balanced_accuracy":
            return balanced_accuracy_of(self.confusion)
        return scores_of(self.confusion.diag(), self.confusion.sum(0), self.confusion.sum(1))[self.score]


class LabelCounts(Metric):
    """Of several classes per sample or pixel: (K, 4) counts of right and false answers, missed and rightly left out.

    score: of each class, for a recipe's metric; None: what a task reports.  A class is answered where its probability is above
    one half.  accuracy: the share of right yes and no.  exact: the share of samples, or pixels, with all classes right.
    """

    full_state_update = False
    counts: Tensor
    exact: Tensor

    def __init__(self, num_classes: int, score: str | None = None) -> None:
        super().__init__(sync_on_compute=False)
        self.score = score
        self.add_state("counts", torch.zeros(num_classes, 4, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("exact", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        answered, truth = answers > 0.5, target > 0.5
        others = tuple(dim for dim in range(target.ndim) if dim != 1)
        pairs = (answered & truth, answered & ~truth, ~answered & truth, ~answered & ~truth)
        self.counts += torch.stack([pair.sum(others) for pair in pairs], dim=1)
        same = (answered == truth).all(1)
        self.exact += torch.stack([same.sum(), torch.tensor(same.numel(), device=same.device)])

    def compute(self) -> dict[str, Tensor] | Tensor:
        right, false, missed, absent = self.counts.unbind(1)
        scores = scores_of(right, right + false, right + missed)
        if self.score is not None:
            return scores[self.score]
        micro = 2 * right.sum() / (2 * right + false + missed).sum().double()
        return {
            "f1": scores["f1"].nanmean(),
            "f1_micro": micro,
            "iou": scores["iou"].nanmean(),
            "accuracy": (right + absent).sum() / self.counts.sum().double(),
            "exact": self.exact[0] / self.exact[1].double(),
            "counts": self.counts,
        }
