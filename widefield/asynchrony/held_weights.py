"""The weights that one server holds, all of them or a part, and how they step: every server does the same with its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from widefield.agreement import DelayCompensation
from widefield.agreement.all_reduce import weighted_mean
from widefield.agreement.server import delay_compensated
from widefield.agreement.serving import Share
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.weight_parts import WeightPart

Push = tuple[int, Share]
"""A worker, and the share whose gradient it pushed."""


@dataclass(frozen=True)
class Update:
    """What every server needs to know of an update, besides the gradients.

    pushes: of whom, in the order of the mean.  counts: of losses in each.  absent: places of parameters that have no gradient
    in any.  rate: the learning rate.
    """

    pushes: tuple[Push, ...]
    counts: tuple[int, ...]
    absent: frozenset[int]
    rate: float


class HeldWeights:
    """flat: of the weights.  optimizer: of what of them is trained.  part: None where these are all."""

    def __init__(
        self, flat: FlatModel, optimizer: Optimizer, compensation: DelayCompensation | None, part: WeightPart | None = None
    ) -> None:
        self.flat, self.optimizer, self.part, self._compensation = flat, optimizer, part, compensation
        self._then: dict[Push, Tensor] = {}
        """The weights of each reading, where delays are compensated."""

    def read(self, worker: int, share: Share) -> Tensor:
        """What the worker is sent, with which it computes the gradient of a share."""
        if self._compensation is not None:
            self._then[worker, share] = self.flat.weights()
        return self.flat.state()

    def forget(self, worker: int, shares: Sequence[Share]) -> None:
        """Of readings whose gradients will not be applied."""
        for share in shares:
            self._then.pop((worker, share), None)

    def take(self, update: Update, gradients: Sequence[Tensor]) -> None:
        """Make the mean the gradient of the weights, compensated for its delay."""
        mean = gradients[0] if len(gradients) == 1 else weighted_mean(list(gradients), list(update.counts))
        if self._compensation is not None:
            assert len(gradients) == 1, "delays of single gradients are compensated"
            then = self._then.pop(update.pushes[0])
            mean = delay_compensated(mean, self.flat.weights(), then, self._compensation.strength)
        self.flat.set_gradient(mean, update.absent if self.part is None else self.part.pieces_at(update.absent))

    def norm(self) -> float:
        """Of the gradient that was taken."""
        found = [one.grad for one in self.flat.trained if one.grad is not None]
        return float(torch.nn.utils.get_total_norm(found)) if found else 0.0

    def step(self, rate: float, scale: float = 1.0) -> None:
        """Step with the gradient that was taken, times `scale`."""
        for one in self.flat.trained:
            if one.grad is not None and scale != 1.0:
                one.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def clip_scale(clip: float, norms: Sequence[float]) -> float:
    """By what gradients of such norms are multiplied, as `torch.nn.utils.clip_grad_norm_` does."""
    return min(1.0, clip / (math.hypot(*norms) + 1e-6))
