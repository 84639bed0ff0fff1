"""The moving average of a model's weights, which is what a run evaluates and exports where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from widefield.sharded_state import local


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model` whose weights follow the model's, `decay` being the weight of the old at each step.

    Make it before the model is laid out, and lay the copy out alike: each rank then averages the parts that it holds.
    """
    move = get_ema_multi_avg_fn(decay)

    def move_parts(averages: list[Tensor], weights: list[Tensor], steps: Tensor | int) -> None:
        move([local(tensor) for tensor in averages], [local(tensor) for tensor in weights], steps)

    return AveragedModel(model, multi_avg_fn=move_parts)


@torch.no_grad()
def follow_buffers(average: AveragedModel, model: nn.Module) -> None:
    """Give the average the model's buffers as they are now: it has those of the last step, and ranks have agreed since."""
    for own, buffer in zip(average.module.buffers(), model.buffers(), strict=True):
        own.copy_(buffer)


def weights_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The average's parameters and buffers under the model's names, out of its `state_dict`; empty where that is."""
    return {name.removeprefix("module."): value for name, value in saved.items() if name.startswith("module.")}
