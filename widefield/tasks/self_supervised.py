"""Learning without labels, from two random views of every image (self-supervised, or contrastive, pretraining).

A view is the image after data.read and data.augment, drawn anew for each of the two from the sample's own seeds.  The model
gives an embedding of each, see models/self_supervised.py.  The loss, vicreg where none is named, is over the embeddings of the
whole batch of all ranks.  Labels of the data are not looked at.  Evaluations draw two views of each image too, always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import Loss
from widefield.tasks._with_loss import WithLoss


class ViewStatistics(Metric):
    """correlation: of the two views' embeddings over images, the mean over dims, up to 1; a dim that is constant has 0.

    std: the mean over dims and views of the embeddings' standard deviation.  Where it falls to 0 all images have one embedding,
    and the network has collapsed.  vicreg keeps it near 1.
    """

    full_state_update = False
    higher_is_better = True
    sums: list[Tensor]

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("sums", [], dist_reduce_fx="cat")  # the number of dims is the model's

    def update(self, answers: Tensor, target: Tensor) -> None:
        one, other = answers.double().unbind(1)
        products = [torch.ones_like(one), one, other, one.square(), other.square(), one * other]
        self.sums.append(torch.stack(products).sum(1)[None])

    def compute(self) -> dict[str, Tensor]:
        number, *sums = torch.cat(self.sums).sum(0)
        mean, mean_of_other, square, square_of_other, product = (one / number for one in sums)
        variances = torch.stack([square - mean.square(), square_of_other - mean_of_other.square()]).clamp(min=0)
        spread = variances.prod(0).sqrt()
        correlation = torch.where(spread > 0, (product - mean * mean_of_other) / spread, 0.0)
        return {"correlation": correlation.mean(), "std": variances.sqrt().mean()}


@dataclass(frozen=True)
class SelfSupervised(WithLoss):
    """Outputs are (B, 2, D), the embeddings of two views; targets are not looked at.  loss: None is vicreg."""

    num_classes: int
    headline: str = "correlation"
    higher_is_better: bool = True
    labels: Labels = "views"
    loss: Loss | None = None
    percent: bool = False

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != (len(target), 2):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"task 'self_supervised' wants the embeddings of two views, ({len(target)}, 2, D), and the model gave {got}; "
                "take model.name=self_supervised with your network as model.options.backbone"
            )
        return output

    def answers(self, output: Tensor) -> Tensor:
        return output

    def metrics(self) -> MetricCollection:
        return MetricCollection({"views": ViewStatistics()}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"correlation of views {values['correlation']:.4f}, std of embeddings {values['std']:.4f}"


def build(num_classes: int) -> SelfSupervised:
    return SelfSupervised(num_classes)


_SAME = torch.tensor([[[1.0, 3.0]] * 2, [[-1.0, 3.0]] * 2], dtype=torch.float64)

CASES = [
    (build(1), _SAME, torch.zeros(2), {"correlation": 0.5, "std": 0.5}),
    (build(1), _SAME[:, :, :1] * torch.tensor([[1.0], [-2.0]]), torch.zeros(2), {"correlation": -1.0, "std": 1.5}),
]
"""As in classification."""
