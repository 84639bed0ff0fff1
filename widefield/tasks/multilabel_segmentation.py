"""Any number of classes per pixel, a layer each: binary cross entropy, IoU and Dice from the counts of all pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks import output_of_pixels
from widefield.tasks._counts import LabelCounts
from widefield.tasks._with_loss import WithLoss


class LayerCounts(LabelCounts):
    """Its values are those of segmentation: F1 of pixels is called Dice."""

    def compute(self) -> dict[str, Tensor]:
        values = super().compute()
        assert isinstance(values, dict)
        return {"iou": values["iou"], "dice": values["f1"], "accuracy": values["accuracy"], "counts": values["counts"]}


@dataclass(frozen=True)
class MultiLabelSegmentation(WithLoss):
    """Targets are (B, num_classes, *pixels) of 0 and 1.  loss: None is binary cross entropy."""

    num_classes: int
    headline: str = "iou"
    higher_is_better: bool = True
    loss: Loss | None = None
    labels: Labels = "layers"

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        sizes = {"batch": len(target), "classes": self.num_classes, "pixels": target.shape[2:]}
        return output_of_pixels("multilabel_segmentation", output, **sizes)

    def answers(self, output: Tensor) -> Tensor:
        """(B, num_classes, *pixels) uint8: 1 where the probability of the class is above one half."""
        return (output > 0).to(torch.uint8)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"layers": LayerCounts(self.num_classes)}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"{values['iou']:.2f} % mean IoU"


def build(num_classes: int) -> MultiLabelSegmentation:
    return MultiLabelSegmentation(num_classes)


_ANSWER = torch.tensor([[[[3.0, 3.0, -3.0]], [[-3.0, 3.0, 3.0]]]] * 2)  # two images of 1 x 3, two classes that overlap

CASES = [
    (build(2), _ANSWER, torch.tensor([[[[1, 1, 0]], [[0, 0, 1]]]] * 2),
     {"iou": (1 + 1 / 2) / 2, "dice": (1 + 2 / 3) / 2, "accuracy": 5 / 6}),
]  # fmt: skip
"""As in classification."""
