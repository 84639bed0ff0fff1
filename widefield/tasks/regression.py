"""Numbers per image: squared error, and RMSE, mean absolute error and R2 in the units of the numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks import output_of
from widefield.tasks._with_loss import WithLoss


class ValueErrors(Metric):
    """Sums of errors in float64, per value: count, |error|, error^2, truth, truth^2.

    rmse, mae: over all samples and values.  r2: the mean over values of 1 - squared error / variance of the truth; NaN where
    the truth is the same everywhere.  errors: (values, 3) the three of each value.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, values: int) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("sums", torch.zeros(5, values, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, target: Tensor) -> None:
        truth, error = target.double(), answers.double() - target.double()
        rows = [torch.ones_like(truth), error.abs(), error**2, truth, truth**2]
        self.sums += torch.stack([row.sum(0) for row in rows])

    def compute(self) -> dict[str, Tensor]:
        count, absolute, squared, truth, truth_squared = self.sums
        spread = truth_squared - truth**2 / count
        r2 = torch.where(spread > 0, 1 - squared / spread, torch.nan)
        return {
            "rmse": (squared.sum() / count.sum()).sqrt(),
            "mae": absolute.sum() / count.sum(),
            "r2": r2.nanmean(),
            "errors": torch.stack([(squared / count).sqrt(), absolute / count, r2], dim=1),
        }


@dataclass(frozen=True)
class Regression(WithLoss):
    """Targets are (B, num_classes) numbers.  loss: None is the squared error."""

    num_classes: int
    headline: str = "rmse"
    higher_is_better: bool = False
    loss: Loss | None = None
    labels: Labels = "values"
    percent: bool = False

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        return output_of("regression", output, batch=len(target), classes=self.num_classes)

    def answers(self, output: Tensor) -> Tensor:
        """(B, num_classes) the numbers."""
        return output

    def metrics(self) -> MetricCollection:
        return MetricCollection({"errors": ValueErrors(self.num_classes)}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"RMSE {values['rmse']:.4g}, R2 {values['r2']:.4f}"


def build(num_classes: int) -> Regression:
    return Regression(num_classes)


CASES = [
    (build(1), torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [3.0], [5.0]]),
     {"rmse": (2 / 3) ** 0.5, "mae": 2 / 3, "r2": 0.75}),
]  # fmt: skip
"""As in classification."""
