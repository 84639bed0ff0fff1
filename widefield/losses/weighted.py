"""A weighted sum of losses of images, as `terms: {charbonnier: 1, ssim: 0.2, total_variation: 0.01}`, per image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from widefield.losses import Loss, Targets
from widefield.losses import build as build_loss
from widefield.losses._of_images import loss_of_images


def build(targets: Targets, *, terms: Mapping[str, Any]) -> Loss:
    """terms: by the name of a loss its weight, or its weight with its options: `{ssim: {weight: 0.2, sigma: 1.0}}`."""
    targets.refuse_unless("weighted", "image")
    if not isinstance(terms, Mapping) or not terms:
        raise ValueError(f"terms is {terms!r}; losses with their weights are wanted, as {{l1: 1, ssim: 0.2}}")
    parts = [_part(name, entry, targets) for name, entry in terms.items()]

    def each(output: Tensor, target: Tensor) -> Tensor:
        return torch.stack([weight * loss.loss_each(output, target) for weight, loss in parts]).sum(0)

    runs_network = any(getattr(loss, "runs_network", False) for _, loss in parts)
    return loss_of_images("weighted", targets, each, runs_network=runs_network)


def _part(name: str, entry: Any, targets: Targets) -> tuple[float, Loss]:
    options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
    weight = options.pop("weight", None)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
        raise ValueError(f"the weight of {name} is {weight!r}; a number of 0 or more is wanted, as {{{name}: 0.2}}")
    if name == "weighted":
        raise ValueError("terms has a weighted sum in a weighted sum; list the losses of the inner one, with their weights")
    return float(weight), build_loss(name, targets, options)


_HALF, _ONE = torch.full((2, 1, 6, 7), 0.5), torch.ones(2, 1, 6, 7)

CASES = [
    (build(Targets("image", 1), terms={"l1": 2, "mse": 1, "ssim": {"weight": 0.5, "sigma": 1.0}}), _HALF, _ONE,
     2 * 0.5 + 0.25 + 0.5 * (1 - 1.0001 / 1.2501)),
]  # fmt: skip
"""As in cross_entropy."""
