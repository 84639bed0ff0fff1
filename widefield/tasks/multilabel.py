"""Any number of classes per image: binary cross entropy, F1 per class, macro and micro."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks import output_of
from widefield.tasks._counts import LabelCounts
from widefield.tasks._with_loss import WithLoss


@dataclass(frozen=True)
class MultiLabel(WithLoss):
    """Targets are (B, num_classes) of 0 and 1.  loss: None is binary cross entropy."""

    num_classes: int
    headline: str = "f1"
    higher_is_better: bool = True
    loss: Loss | None = None
    labels: Labels = "classes"
    percent: bool = False

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        return output_of("multilabel", output, batch=len(target), classes=self.num_classes)

    def answers(self, output: Tensor) -> Tensor:
        """(B, num_classes) the probability of each class; they do not add up to 1."""
        return output.sigmoid()

    def metrics(self) -> MetricCollection:
        return MetricCollection({"labels": SampleCounts(self.num_classes)}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"mean F1 {values['f1']:.4f}"


class SampleCounts(LabelCounts):
    """f1: the mean over classes; f1_micro: of all classes together.  exact: the share of samples with all classes right.

    right: the share of right yes and no, of all classes together.
    """

    def compute(self) -> dict[str, Tensor]:
        values = super().compute()
        assert isinstance(values, dict)
        names = {"f1": "f1", "f1_micro": "f1_micro", "exact": "exact", "right": "accuracy", "counts": "counts"}
        return {name: values[key] for name, key in names.items()}


def build(num_classes: int) -> MultiLabel:
    return MultiLabel(num_classes)


CASES = [
    (build(3), torch.tensor([[2.0, -1.0, -1.0], [2.0, 1.0, -1.0]]), torch.tensor([[1, 0, 0], [0, 1, 0]]),
     {"f1": (2 / 3 + 1) / 2, "f1_micro": 0.8, "right": 5 / 6, "exact": 0.5}),  # class 2 is nowhere
    (build(1), torch.tensor([[2.0], [-2.0]]), torch.tensor([[1], [1]]), {"f1": 2 / 3, "exact": 0.5}),
]  # fmt: skip
"""As in classification."""
