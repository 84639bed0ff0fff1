"""The optimizer of a worker, a server or an outer step, on one tensor of any shape and dtype: SGD with momentum, and AdamW.

The formulas are torch.optim's.  They are here once more because a server keeps their state per part of the parameters, and a
worker that comes back takes that of a peer.  Learning rates are functions of the samples learned from, since the number of
updates per epoch differs between algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

LearningRate = float | Callable[[int], float]
"""A number, or a function from the number of samples learned from, over all workers, to one."""


@dataclass(frozen=True)
class Descent:
    """Options of an optimizer.

    lr_samples: how many samples `lr` is meant for: an update of m samples is made with lr * m / lr_samples (the linear scaling
        rule of Goyal et al. 2017, arXiv:1706.02677), so that 8 pushes of 16 samples go as far as one step of 128.
        None: with lr, whatever the number of samples.
    momentum, nesterov: of SGD.  betas, eps: of AdamW.
    """

    lr: LearningRate = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_samples: int | None = None
    kind: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """ValueError: an option that no optimizer has, or that the other kind has."""
        if self.kind not in ("sgd", "adamw"):
            raise ValueError(f"an optimizer of the kind {self.kind!r}; take sgd or adamw")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"a momentum of {self.momentum} adds up without end; take one from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("Nesterov's step looks ahead along the momentum, which is 0; set momentum, as 0.9")
        if self.kind == "adamw" and self.momentum:
            raise ValueError(f"AdamW takes betas and no momentum, which is {self.momentum}; leave it out")
        if self.lr_samples is not None and self.lr_samples < 1:
            raise ValueError(f"a learning rate for {self.lr_samples} samples; take lr_samples of 1 or more, or None")

    def rate(self, *, seen: int, count: int) -> float:
        """The learning rate of an update with `count` samples after `seen` ones.  ValueError: it is negative or not finite."""
        rate = self.lr(seen) if callable(self.lr) else self.lr
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"the learning rate after {seen:,} samples is {rate}; it has to be a finite number of 0 or more")
        return rate if self.lr_samples is None else rate * count / self.lr_samples


@dataclass
class DescentState:
    """What an optimizer remembers of one tensor.  first: the momentum, or AdamW's mean; second: AdamW's mean square."""

    options: Descent
    first: Tensor | None = None
    second: Tensor | None = None
    steps: int = field(default=0)

    def step(self, weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The new weights; the given ones stay as they are."""
        self.steps += 1
        return (self._sgd if self.options.kind == "sgd" else self._adamw)(weights, gradient, rate)

    def _sgd(self, weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
        options = self.options
        if options.weight_decay:
            gradient = gradient + options.weight_decay * weights
        if options.momentum:
            self.first = gradient.clone() if self.first is None else options.momentum * self.first + gradient
            gradient = gradient + options.momentum * self.first if options.nesterov else self.first
        return weights - rate * gradient

    def _adamw(self, weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
        (slow, slower), options = self.options.betas, self.options
        zeros = torch.zeros_like(weights)
        self.first = slow * (zeros if self.first is None else self.first) + (1 - slow) * gradient
        self.second = slower * (zeros if self.second is None else self.second) + (1 - slower) * gradient.square()
        size = (self.second / (1 - slower**self.steps)).sqrt() + options.eps
        return weights * (1 - rate * options.weight_decay) - rate / (1 - slow**self.steps) * self.first / size

    def copy(self) -> DescentState:
        """For a worker that takes this state; tensors are never changed in place, so they are shared."""
        return replace(self)
