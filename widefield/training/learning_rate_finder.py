"""`optimizer.lr=find`: a learning rate from a test of 100 steps before step 1 (Smith 2017, arXiv:1506.01186).

The rate grows geometrically from LOWEST to HIGHEST, a step on the next batch with each, until the smoothed loss is DIVERGED
times its least.  Chosen is a tenth of the rate at which the smoothed loss was least.  Then all is as before the test: weights,
statistics, the optimizer's state, random numbers.  The steps are those of training, so every plan chooses the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from widefield import sharded_state
from widefield.comm.mesh import AgreedError
from widefield.parallel.strategies.data import hook_state, load_hook_state
from widefield.training.assemble import Parts, training_batches
from widefield.training.guard import Guard
from widefield.training.loop import Learner, NonFiniteLossError
from widefield.training.passes import Passes
from widefield.training.schedule import Schedule
from widefield.training.state import load_random_state, random_state
from widefield.training.terminal import say

STEPS, LOWEST, HIGHEST = 100, 1e-6, 10.0
SMOOTHING, DIVERGED = 0.9, 4.0
"""The weight of the old average of losses at each step; the multiple of the least average at which the test ends."""
DIVISOR = 10.0
SHOWN = 15
"""How many points of the curve are printed."""


@dataclass(frozen=True)
class Curve:
    """The learning rates of the test, and the smoothed loss after a step with each."""

    rates: list[float]
    losses: list[float]

    @property
    def chosen(self) -> float:
        return self.rates[self.losses.index(min(self.losses))] / DIVISOR

    def in_words(self) -> list[str]:
        best = self.rates[self.losses.index(min(self.losses))]
        shown = range(0, len(self.rates), -(-len(self.rates) // SHOWN))
        points = "  ".join(f"{self.rates[number]:.1e}: {self.losses[number]:.4g}" for number in shown)
        return [
            f"optimizer.lr={self.chosen:.3g}: a tenth of {best:.3g}, at which the loss was least in {len(self.rates)} steps of "
            "growing learning rate",
            f"  loss by learning rate: {points}",
        ]


def find_learning_rate(parts: Parts, learner: Learner, *, is_asked_to_stop: Callable[[], bool]) -> list[str]:
    """Set the learner's peak learning rate by a test; returns the reason and the curve.  Every rank calls it at step 0.

    AgreedError, on every rank: the first losses are not finite, or a rank is asked to stop.
    """
    if learner.mesh.is_main:
        say(f"optimizer.lr=find: up to {STEPS} steps with learning rates from {LOWEST:g} to {HIGHEST:g}")
    with _as_before(learner):
        curve = _tested(parts, learner, is_asked_to_stop)
    if len(curve.losses) < 2:
        raise AgreedError(
            "optimizer.lr=find: the loss is not finite at the lowest learning rates, so there is nothing to find; see to the "
            "data and the model's weights, or set optimizer.lr"
        )
    learner.lr = curve.chosen
    return curve.in_words()


def _tested(parts: Parts, learner: Learner, is_asked_to_stop: Callable[[], bool]) -> Curve:
    passes = Passes(
        training_batches(parts, first=0, last=STEPS, dummy_batch=learner.dummy_batch), parts.config.gradient.accumulate
    )
    rates, losses, average = list[float](), list[float](), 0.0
    try:
        for number in range(STEPS):
            learner.lr = LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))
            try:
                loss, stopped = learner.learn(passes.next(), stop=is_asked_to_stop())
            except NonFiniteLossError:
                break
            if stopped:
                raise AgreedError("stopped in the search for a learning rate, so nothing was trained; start it again")
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            rates.append(learner.lr)
            losses.append(average / (1 - SMOOTHING ** (number + 1)))
            if losses[-1] > DIVERGED * min(losses) or not math.isfinite(losses[-1]):
                break
    finally:
        passes.close()
    return Curve(rates, losses)


# ---------------------------------------------------------------------------------------------- as before the test


@contextmanager
def _as_before(learner: Learner) -> Iterator[None]:
    """Inside, the learner has the schedule of a constant rate and no average; afterwards it is as it was."""
    tensors = {name: tensor.detach().clone() for name, tensor in _tensors(learner.model)}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in learner.optimizer.param_groups]
    scaler, random, hook = learner.scaler.state_dict(), random_state(), hook_state(learner.model)
    kept = {name: getattr(learner, name) for name in ("schedule", "ema", "step", "order", "lr", "guard")}
    learner.schedule, learner.ema, learner.guard = _constant(learner.schedule), None, Guard()
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(learner, name, value)
        learner.skipped.clear()
        _restore_tensors(learner.model, tensors)
        _restore_optimizer(learner.optimizer, groups)
        learner.scaler.load_state_dict(scaler)
        load_hook_state(learner.model, hook)
        load_random_state(random)


def _constant(schedule: Schedule) -> Schedule:
    return replace(schedule, warmup=0, curve=lambda schedule, share, samples: 1.0)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """This rank's parameters and buffers, of sharded ones its shard, sharing their memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, sharded_state.local(tensor).detach()) for name, tensor in named if not tensor.is_meta]


def _restore_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    for name, tensor in _tensors(model):
        tensor.copy_(tensors[name])


def _restore_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Drop all state, and counters that an optimizer keeps in its groups."""
    optimizer.state.clear()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        for key in [key for key in group if key != "params" and key not in before]:
            del group[key]
        group.update(before)
