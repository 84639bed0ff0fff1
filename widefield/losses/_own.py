"""A user's own loss: `package.module:callable` in a recipe, or an object of a Python program.

It is called with (output, target) and returns the losses unreduced: (B,) of each sample, or one for each number of the target,
so that their sum and count are exact on any ranks and tiles.  A module of torch.nn gives those with reduction="none", which is
set here.  An object with `loss_sum` and `count`, as those in widefield/losses/, is taken as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from widefield.losses import Loss, Targets, of_samples
from widefield.own_code import call, code_named, takes

CONTRACT = "let it return one loss per sample, (B,), or one per number of the target, unreduced"


@dataclass(frozen=True)
class OwnLoss:
    """per: what the losses are of."""

    targets: Targets
    losses: Callable[[Tensor, Tensor], Tensor]
    per: Literal["sample", "element"]

    @property
    def counts_images(self) -> bool:
        return self.per == "sample"

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self._masked(output, target).sum()

    def count(self, target: Tensor) -> int | Tensor:
        return len(target) if self.per == "sample" else self.targets.number(target)

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        losses, counted = self._masked(output, target), self.targets.counted(target)
        if self.per == "sample":
            return losses
        number = losses[0].numel() if counted is None else of_samples(counted).clamp(min=1)
        return of_samples(losses) / number

    def _masked(self, output: Tensor, target: Tensor) -> Tensor:
        """The losses, 0 where the target does not count; the function sees class 0 there, since no class has that label."""
        counted = self.targets.counted(target)
        if counted is None or self.per == "sample":
            return self.losses(output, target)
        return torch.where(counted, self.losses(output, torch.where(counted, target, 0)), 0.0)


def named(name: str, targets: Targets, options: dict[str, Any]) -> Loss:
    """The loss that `package.module:callable` names: a class is made with the options, a function gets them in each call."""
    found = code_named(name, key="task.loss")
    none = {"reduction": "none"} if takes(found, "reduction") and "reduction" not in options else {}
    if inspect.isclass(found):
        made = call(found, options=options | none, key="task.loss_options", name=name)
    else:
        made = partial(found, **options, **none)
    return checked(made, targets, name=f"task.loss={name}")


def checked(given: Any, targets: Targets, *, name: str) -> Loss:
    """A user's loss as a Loss, tried on an example.  name: for the errors.

    ValueError: it cannot be called so, or reduces its losses, or gives a sample another loss in another batch.
    """
    if callable(getattr(given, "loss_sum", None)) and callable(getattr(given, "count", None)):
        return given
    if not callable(given) or inspect.isclass(given):
        what = f"the class {given.__name__}" if inspect.isclass(given) else f"a {type(given).__name__}"
        raise ValueError(f"{name} gives {what}; a function of (output, target) is wanted, or an object that is called so")
    if targets.weights is not None:
        raise ValueError(f"{name} is a loss of your own, and task.class_weights are for ours; give it the weights itself")
    losses = _unreduced(given)
    output, target = _example(targets)
    tried = _called(losses, output, target, name)
    per: Literal["sample", "element"] = "sample" if tried.shape == (len(target),) else "element"
    if tried.shape not in ((len(target),), target.shape):
        shapes = [tuple(one.shape) for one in (tried, output, target)]
        advice = _scalar_advice(given) if tried.ndim == 0 else CONTRACT
        raise ValueError(
            f"{name} gives a tensor of shape {shapes[0]} for outputs of {shapes[1]} and targets of {shapes[2]}; {advice}"
        )
    parts = [_called(losses, output[part], target[part], name) for part in (slice(0, 1), slice(1, None))]
    if not torch.allclose(torch.cat(parts), tried, rtol=1e-5, equal_nan=True):
        raise ValueError(f"{name} gives a sample another loss in another batch, so it would change with the ranks; {CONTRACT}")
    return OwnLoss(targets, losses, per)


def _unreduced(given: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss with its attribute `reduction` set to none, on a copy, where it is a mean or a sum."""
    if getattr(given, "reduction", None) not in ("mean", "sum"):
        return given
    alone = copy.deepcopy(given)
    alone.reduction = "none"
    return alone


def _scalar_advice(given: Any) -> str:
    kind = "its attribute reduction did not change that" if isinstance(given, nn.Module) else "a mean over a batch is no sum"
    return f"{kind}, and the batch is divided over ranks and passes: {CONTRACT}"


def _called(losses: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor, name: str) -> Tensor:
    try:
        found = losses(output, target)
    except Exception as error:
        shapes = [tuple(one.shape) for one in (output, target)]
        raise ValueError(
            f"{name} fails with outputs of {shapes[0]} and targets of {shapes[1]}: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(found, Tensor):
        raise ValueError(f"{name} gives a {type(found).__name__} and no tensor; {CONTRACT}")
    return found.detach()


def _example(targets: Targets) -> tuple[Tensor, Tensor]:
    """Random outputs, and targets as the task has them: float32, and int64 or, of numbers, float32."""
    generator = torch.Generator().manual_seed(0)
    samples, pixels = 6, (4, 5) if targets.kind in ("pixels", "layers", "image") else ()
    if targets.kind == "views":
        return torch.randn(samples, 2, 8, generator=generator), torch.zeros(samples)
    output = torch.randn(samples, targets.outputs, *pixels, generator=generator)
    if targets.kind in ("values", "image"):
        return output, torch.randn(output.shape, generator=generator)
    if targets.kind in ("classes", "layers"):
        return output, torch.randint(2, output.shape, generator=generator)
    return output, torch.randint(targets.outputs, (samples, *pixels), generator=generator)
