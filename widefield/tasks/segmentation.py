"""One class per pixel: cross entropy, and IoU, Dice and accuracy from the counts of all pixels.

The loss is a sum over pixels and their number, and the metrics come from one confusion matrix of pixel counts.  So the numbers
do not depend on how pixels are divided into images, tiles and ranks: there is no mean of means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks import output_of_pixels
from widefield.tasks._with_loss import WithLoss


class PixelCounts(Metric):
    """The confusion matrix of pixels, (truth, prediction), and what follows from it; its one state is a sum.

    iou, dice: means over the classes that stand in the truth or in the predictions; a class in neither has no value and
        does not count.  accuracy: share of pixels answered right.  All three are NaN where no pixel was counted.
    """

    full_state_update = False
    higher_is_better = True
    confusion: Tensor

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        super().__init__(sync_on_compute=False)
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.add_state("confusion", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        counted = target != self.ignore_index
        pairs = target[counted] * self.num_classes + answers[counted]
        self.confusion += torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.confusion)

    def compute(self) -> dict[str, Tensor]:
        right, seen = self.confusion.diag().double(), self.confusion.double()
        either = seen.sum(0) + seen.sum(1) - right
        return {
            "iou": (right / either)[either > 0].mean(),
            "dice": (2 * right / (either + right))[either > 0].mean(),
            "accuracy": right.sum() / seen.sum(),
            "confusion": self.confusion,
        }


@dataclass(frozen=True)
class Segmentation(WithLoss):
    """Targets are (B, *pixels) class numbers; pixels of `ignore_index` count neither in the loss nor in the metrics.

    loss: None is cross entropy.
    """

    num_classes: int
    ignore_index: int = 255
    headline: str = "iou"
    higher_is_better: bool = True
    labels: Labels = "pixels"
    loss: Loss | None = None

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        return output_of_pixels("segmentation", output, classes=self.num_classes, batch=len(target), pixels=target.shape[1:])

    def answers(self, output: Tensor) -> Tensor:
        """(B, *pixels) class numbers: probabilities would take `num_classes` times the memory."""
        return output.argmax(1)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"pixels": PixelCounts(self.num_classes, self.ignore_index)}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"{values['iou']:.2f} % mean IoU"


def build(num_classes: int, *, ignore_index: int = 255) -> Segmentation:
    """ignore_index: the label of pixels that do not count, outside the classes (255 fits labels of 8 bits, or -1)."""
    if type(ignore_index) is not int or 0 <= ignore_index < num_classes:
        why = f"one of the {num_classes} classes" if type(ignore_index) is int else "no whole number"
        raise ValueError(
            f"task.options.ignore_index is {ignore_index!r}, which is {why}; "
            f"take a number outside 0..{num_classes - 1}, as -1 or 255"
        )
    return Segmentation(num_classes, ignore_index)


_ANSWER = F.one_hot(torch.tensor([[[0, 0, 1, 1]]] * 2), 3).movedim(-1, 1).float()  # two images of 1 x 4, answered alike

CASES = [
    (
        build(3),
        _ANSWER,
        torch.tensor([[[0, 1, 1, 1]], [[0, 255, 1, 255]]]),
        {"iou": (2 / 3 + 3 / 4) / 2, "dice": (4 / 5 + 6 / 7) / 2, "accuracy": 5 / 6},  # class 2 is nowhere, so it counts not
    ),
    (
        build(3, ignore_index=-1),
        _ANSWER,
        torch.tensor([[[1, 1, -1, -1]], [[-1, -1, -1, -1]]]),
        {"iou": 0.0, "dice": 0.0, "accuracy": 0.0},
    ),
]
"""As in classification."""
