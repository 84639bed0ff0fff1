"""The loss methods of a task whose loss is a part of it, as a recipe's `task.loss` sets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from widefield import losses
from widefield.config import TaskConfig
from widefield.losses import DEFAULTS, Loss, Targets, _own
from widefield.own_code import is_code, refuse_object


class WithLoss:
    """A task's loss methods, which call its `loss`."""

    loss: Loss | None
    """Set by the task where it is made; None only in between."""
    num_classes: int

    def __post_init__(self) -> None:
        """Where no loss is given, take that of this kind of targets."""
        if self.loss is None:
            object.__setattr__(self, "loss", _loss_of(self, TaskConfig(), None, None))  # tasks are frozen

    def fitting(self, output: Any, target: Tensor) -> Tensor:
        """The output, checked against the target.  ValueError: it does not fit."""
        raise NotImplementedError

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss.loss_sum(self.fitting(output, target), target)

    def count(self, target: Tensor) -> int | Tensor:
        return self._loss.count(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss.loss_each(self.fitting(output, target), target)

    @property
    def counts_images(self) -> bool:
        """Whether `count` is of samples, although targets are of pixels."""
        return getattr(self._loss, "counts_images", False)

    @property
    def sums(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """`sums` of a loss that has it, see LossOfSums; None of others."""
        of_loss = getattr(self._loss, "sums", None)
        return None if of_loss is None else lambda output, target: of_loss(self.fitting(output, target), target)

    @property
    def finish(self) -> Callable[[Tensor], Tensor] | None:
        return getattr(self._loss, "finish", None)

    @property
    def _loss(self) -> Loss:
        assert self.loss is not None, "a task sets its loss when it is made"
        return self.loss


def with_loss(task: Any, config: TaskConfig, *, given: Any = None, weights: Tensor | None = None) -> Any:
    """The task with the loss that the recipe, or a Python program, sets.

    given: a loss object; None: the config's.  weights: (classes,) of the classes.
    ValueError: the task has a loss of its own, or the loss does not fit it.
    """
    if given is None and config.loss is None and weights is None and not config.loss_options:
        return task
    if not isinstance(task, WithLoss) or type(task).loss_sum is not WithLoss.loss_sum:
        key = next(key for key, value in
                   (("loss", given or config.loss), ("class_weights", weights), ("loss_options", config.loss_options))
                   if value is not None)  # fmt: skip
        raise ValueError(
            f"task.{key} is set and task.name={config.name} has a loss of its own; leave it out, or take a task of widefield's"
        )
    return dataclasses.replace(task, loss=_loss_of(task, config, given, weights))  # type: ignore[type-var]


def _loss_of(task: Any, config: TaskConfig, given: Any, weights: Tensor | None) -> Loss:
    targets = Targets(task.labels, task.num_classes, getattr(task, "ignore_index", None), weights)
    if given is not None:
        return _own.checked(given, targets, name=f"loss={type(given).__name__}")
    name = config.loss or DEFAULTS[task.labels]
    refuse_object(name, key="task.loss", keyword="loss")
    if is_code(name):
        return _own.named(name, targets, config.loss_options)
    smoothing = getattr(task, "label_smoothing", 0.0)
    options = {"label_smoothing": smoothing} if smoothing and name == "cross_entropy" else {}
    if smoothing and not options:
        raise ValueError(
            f"task.options has label_smoothing={smoothing:g} and task.loss={name} has none of that name there; give the loss's "
            "own in task.loss_options, or leave it out"
        )
    return losses.build(name, targets, options | config.loss_options)
