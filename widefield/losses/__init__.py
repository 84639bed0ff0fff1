"""Losses, one file per loss, each with `build(targets, **options)` and CASES; a user's own are in _own.py.

A loss is a sum and a count, both over samples, pixels or values, so that it is exact however the batch is divided.  A loss that
is no such quotient, as the Dice loss of a batch, has `sums`, which add up over samples, and `finish`, which makes one number of
them.  Its batch is that of a pass, over all ranks, as it is for batch normalization.
Class weights divide as in torch: by the sum of the weights of what was counted, not by the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from widefield.config.field_types import Labels
from widefield.naming import load

DEFAULTS: dict[Labels, str] = {
    "class": "cross_entropy", "pixels": "cross_entropy", "classes": "binary_cross_entropy", "layers": "binary_cross_entropy",
    "values": "mse", "image": "l1", "views": "vicreg",
}  # fmt: skip
"""The loss of each kind of targets where a recipe names none."""


def widened(output: Any) -> Any:
    """The tensors of an output, or of lists and tuples of such, in float32 or wider, in which losses are computed."""
    if isinstance(output, Tensor):
        return output.to(torch.promote_types(output.dtype, torch.float32))
    if isinstance(output, list | tuple) and not hasattr(output, "_fields"):
        return type(output)(map(widened, output))
    return output


@dataclass(frozen=True)
class Targets:
    """What a loss has to know of the targets.

    outputs: the number of classes, or of values.  ignore: the label that does not count, of classes of pixels.
    weights: (outputs,) the weight of each class; None: all are 1.
    """

    kind: Labels
    outputs: int
    ignore: int | None = None
    weights: Tensor | None = None

    def refuse_unless(self, loss: str, *kinds: Labels) -> None:
        """ValueError: the loss is not for targets of this kind."""
        if self.kind not in kinds:
            raise ValueError(
                f"task.loss={loss} is for targets of the kinds {', '.join(kinds)} and the task learns '{self.kind}'; take "
                f"another, as {DEFAULTS[self.kind]}"
            )

    def refuse_weights(self, loss: str, why: str) -> None:
        """ValueError: there are class weights, which this loss does not use."""
        if self.weights is not None:
            raise ValueError(f"task.loss={loss} takes no class weights: {why}; leave task.class_weights out")

    def counted(self, target: Tensor) -> Tensor | None:
        """Which targets count, in their shape; None where all do."""
        return None if self.ignore is None or self.kind != "pixels" else target != self.ignore

    def number(self, target: Tensor) -> int | Tensor:
        """How many targets count: samples, pixels, or samples or pixels times classes or values."""
        counted = self.counted(target)
        if counted is not None:
            return counted.sum()
        return len(target) if self.kind == "class" else target.numel()

    def weights_like(self, tensor: Tensor) -> Tensor:
        assert self.weights is not None
        return self.weights.to(tensor.device, tensor.dtype)


class Loss(Protocol):
    """A loss that is a sum over a count.  output: (B, outputs) or (B, outputs, *pixels), float32 or wider."""

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the losses of what counts."""

    def count(self, target: Tensor) -> int | Tensor:
        """By what the sum of these targets is divided."""

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """(B,) the loss of each sample alone."""


class LossOfSums(Loss, Protocol):
    """A loss of sums; its `loss_sum` is the loss of the samples given, times their number, which is its `count`."""

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """(S,) or any shape: what adds up over samples, and over tiles of an image."""

    def finish(self, sums: Tensor) -> Tensor:
        """The loss, a scalar, of the added sums; finite where nothing counted."""


class FinishedLoss:
    """`loss_sum`, `count` and `loss_each` of a loss that has `sums` and `finish`."""

    sums: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self.finish(self.sums(output, target)) * len(target)

    def count(self, target: Tensor) -> int:
        return len(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        each = [self.sums(output[row : row + 1], target[row : row + 1]) for row in range(len(target))]
        return torch.stack([self.finish(sums) for sums in each])


def build(name: str, targets: Targets, options: dict[str, Any]) -> Loss:
    """The loss that a recipe names.  ValueError: there is none, it does not take the options, or is for other targets."""
    module = load("widefield.losses", name)
    try:
        return module.build(targets, **options)
    except TypeError as error:
        raise ValueError(f"task.loss_options {options} do not fit '{name}': {error}") from None


def of_samples(tensor: Tensor) -> Tensor:
    """(B,) the sum over everything but the samples."""
    return tensor.sum(tuple(range(1, tensor.ndim))) if tensor.ndim > 1 else tensor


def quotient(total: Tensor, count: Tensor) -> Tensor:
    """total / count; 0 where nothing was counted."""
    return total / torch.where(count == 0, torch.ones_like(count), count)
