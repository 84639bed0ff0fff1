"""The server's numbers: a gradient becomes an update of the weights by the recipe's optimizer.

The learning rate is the schedule's after the samples whose gradients have come so far.  An update with one gradient is made
with that times its samples / data.batch_size, so that all updates of a step together go as far as the step would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widefield.agreement import Compression, DelayCompensation, Descent, ParameterServer
from widefield.agreement.all_reduce import weighted_mean
from widefield.agreement.server import delay_compensated
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import WorkersGradient, not_finite
from widefield.config import RunConfig
from widefield.config.agreement import AgreementConfig
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.training.loop import Learner


def algorithm_of(config: RunConfig, *, lr: float) -> ParameterServer:
    """What a recipe's section asks for, as the simulator knows it.

    Its optimizer is the recipe's where that is sgd or adamw with a constant rate and without what is only in torch's.
    """
    asked, optimizer = config.agreement, config.optimizer
    samples = None if asked.kind == "synchronous" else config.data.batch
    return ParameterServer(
        descent_of(config, Descent(lr=lr, weight_decay=optimizer.weight_decay, lr_samples=samples)),
        "synchronous" if asked.kind == "synchronous" else "asynchronous",
        bound=asked.bound,
        max_staleness=asked.max_staleness,
        compensation=compensation_of(asked),
        compression=compression_of(asked),
    )


def descent_of(config: RunConfig, descent: Descent) -> Descent:
    """`descent` with what the recipe's optimizer has, of sgd or adamw."""
    optimizer = config.optimizer
    if optimizer.name == "sgd":
        return replace(descent, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    return replace(descent, kind="adamw", betas=tuple(optimizer.betas)) if optimizer.name == "adamw" else descent


def compensation_of(asked: AgreementConfig) -> DelayCompensation | None:
    return None if asked.compensation is None else DelayCompensation(asked.compensation)


def compression_of(asked: AgreementConfig) -> Compression | None:
    """What is done to what workers push; None: nothing."""
    if asked.compression is None:
        return None
    return Compression(asked.compression, share=asked.compression_share, block=asked.compression_block)


@dataclass(frozen=True)
class Arrived:
    """A gradient with what was known when it came.  number: in the log.  version: of the weights that it is of."""

    number: int
    of: WorkersGradient
    worker: int
    version: int
    samples: int
    seen: int


class ServedWeights:
    """The server's model and optimizer.  received: samples whose gradients have come."""

    def __init__(self, learner: Learner, asked: AgreementConfig) -> None:
        self.learner, self.flat = learner, FlatModel(learner.model)
        self.version, self.received = 0, learner.steps.seen(learner.step)
        self._compensation, self._is_synchronous = compensation_of(asked), asked.kind == "synchronous"
        self._read: dict[int, tuple[int, Tensor | None]] = {}
        """By worker, the version that it read and, where delays are compensated, its weights."""

    def read(self, worker: int) -> Tensor:
        """What the worker is sent."""
        self._read[worker] = self.version, self.flat.weights() if self._compensation is not None else None
        return self.flat.state()

    def arrive(self, worker: int, gradient: WorkersGradient, *, number: int, samples: int) -> Arrived:
        """AgreedError: the loss or the gradient is no finite number."""
        if not (math.isfinite(gradient.loss_sum) and bool(torch.isfinite(gradient.gradient).all())):
            raise not_finite(gradient, worker)
        arrived = Arrived(number, gradient, worker, self._read[worker][0], samples, self.received)
        self.received += samples
        return arrived

    def update(self, gradients: Sequence[Arrived]) -> list[int]:
        """Step once with the mean of gradients; their staleness.  Those without a loss that counts change nothing."""
        samples, gradients = sum(one.samples for one in gradients), [one for one in gradients if one.of.count]
        if not gradients:
            return []
        counts = [round(one.of.count) for one in gradients]
        mean = (
            gradients[0].of.gradient if len(gradients) == 1 else weighted_mean([one.of.gradient for one in gradients], counts)
        )
        if self._compensation is not None:
            then = self._read[gradients[0].worker][1]
            assert then is not None and len(gradients) == 1, "delays of single gradients are compensated"
            mean = delay_compensated(mean, self.flat.weights(), then, self._compensation.strength)
        self.flat.set_gradient(mean, frozenset.intersection(*(one.of.absent for one in gradients)))
        self._step(gradients, samples)
        self.flat.move_statistics(_weighted([one.of.statistics for one in gradients], counts))
        staleness = [self.version - one.version for one in gradients]
        self.version += 1
        return staleness

    def _step(self, gradients: Sequence[Arrived], samples: int) -> None:
        learner, clip = self.learner, self.learner.config.optimizer.clip_norm
        share = 1.0 if self._is_synchronous else samples / learner.steps.batch
        rate = learner.lr * learner.schedule.factor(min(one.seen for one in gradients)) * share
        for group in learner.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        if clip is not None:
            clip_grad_norm_(learner.model, learner.mesh, clip)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)


def _weighted(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else weighted_mean(list(tensors), list(counts))
