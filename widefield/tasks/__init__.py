"""What a network is trained for: a file per task, each with `build(num_classes, **options)` and CASES."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from widefield.config import TaskConfig
from widefield.naming import load


class Task(Protocol):
    """A loss that is a sum and a count, and metrics whose states add up.  Knows nothing of ranks."""

    headline: str
    """Which metric is the result, as a key of `metrics()`."""
    higher_is_better: bool

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss added up over samples (or pixels), a scalar."""

    def count(self, target: Tensor) -> int | Tensor:
        """How many samples (or pixels) that sum is over."""

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """(B,) loss of each sample, the mean where it has several pixels, to find the worst."""

    def metrics(self) -> MetricCollection:
        """Fresh metrics from 0 to 1, updated with `(answers(output), target)`; every state is reduced by sum."""

    def answers(self, output: Tensor) -> Tensor:
        """What metrics compare and users see: (B, num_classes) probabilities or, per pixel, (B, *pixels) class numbers."""

    def sentence(self, values: dict[str, float]) -> str:
        """`98.61 % top-1`: the result as said in a log; `values` are in percent."""


def is_per_pixel(task: Task) -> bool:
    """Whether targets have a class number for every pixel: a task that says `pixels = True`, else one for every image."""
    return getattr(task, "pixels", False)


def build(config: TaskConfig, *, num_classes: int) -> Task:
    """The task a config names; ValueError where there is none or it does not take the options."""
    module = load("widefield.tasks", config.name)
    try:
        return module.build(num_classes, **config.options)
    except TypeError as error:
        raise ValueError(f"task.options {config.options} do not fit '{config.name}': {error}") from None


def output_of(task_name: str, output: Any, *, batch: int, classes: int, pixels: bool = False) -> Tensor:
    """The output itself if it is a tensor of (batch, classes), or (batch, classes, ...) with `pixels`; else ValueError."""
    if isinstance(output, torch.Tensor) and output.shape[:2] == (batch, classes) and (output.ndim > 2) == pixels:
        return output
    wanted = f"({batch}, {classes}{', ...' if pixels else ''})"
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    raise ValueError(
        f"task '{task_name}' wants an output of shape {wanted} and the model gave {got}; "
        "take a model that answers so, set its number of classes, or switch auxiliary outputs off in model.options"
    )
