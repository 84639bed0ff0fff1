"""One class per image: cross entropy, top-1 and top-5 accuracy, confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks import output_of
from widefield.tasks._with_loss import WithLoss


@dataclass(frozen=True)
class Classification(WithLoss):
    """Targets are (B,) class numbers or, after mixing, (B, num_classes) probabilities.  loss: None is cross entropy."""

    num_classes: int
    label_smoothing: float = 0.0
    headline: str = "top1"
    higher_is_better: bool = True
    loss: Loss | None = None
    labels: Labels = "class"

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        return output_of("classification", output, batch=len(target), classes=self.num_classes)

    def answers(self, output: Tensor) -> Tensor:
        return output.softmax(1)

    def metrics(self) -> MetricCollection:
        options = {"num_classes": self.num_classes, "validate_args": False, "sync_on_compute": False}
        few = {"top5": MulticlassAccuracy(top_k=5, average="micro", **options)} if self.num_classes > 5 else {}
        return MetricCollection(
            {
                "top1": MulticlassAccuracy(top_k=1, average="micro", **options),
                **few,
                "confusion": MulticlassConfusionMatrix(**options),
            },
            compute_groups=False,
        )

    def sentence(self, values: dict[str, float]) -> str:
        return f"{values['top1']:.2f} % top-1"


def build(num_classes: int, *, label_smoothing: float = 0.0) -> Classification:
    """label_smoothing: share of each target spread evenly over all classes (0 to 1)."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"task.options.label_smoothing is {label_smoothing}; a number from 0 to below 1 is wanted")
    return Classification(num_classes, label_smoothing)


CASES = [
    (build(3), torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 2]), {"top1": 0.5}),
    (build(3, label_smoothing=0.1), torch.eye(3), torch.tensor([0, 1, 2]), {"top1": 1.0}),
]
"""(task, output, target, metrics)."""
