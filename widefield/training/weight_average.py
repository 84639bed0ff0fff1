"""The exponential moving average (EMA) of a model's weights, which a run with `ema` evaluates and exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from widefield.sharded_state import local


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model` that averages its weights: average = decay * average + (1 - decay) * weight at each step.

    Make it before the model is parallelized, and pass the copy to `parallelize_average`: each rank then averages its shards.
    """
    update = get_ema_multi_avg_fn(decay)

    def update_shards(averages: list[Tensor], weights: list[Tensor], steps: Tensor | int) -> None:
        update([local(tensor) for tensor in averages], [local(tensor) for tensor in weights], steps)

    return AveragedModel(model, multi_avg_fn=update_shards)


@torch.no_grad()
def follow_buffers(average: AveragedModel, model: nn.Module) -> None:
    """Copy the model's buffers to the average, whose buffers are those of the last step, before ranks synchronized them."""
    for own, buffer in zip(average.module.buffers(), model.buffers(), strict=True):
        own.copy_(buffer)


def weights_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The average's parameters and buffers by the model's names, from its `state_dict`; {} for an empty one."""
    return {name.removeprefix("module."): value for name, value in saved.items() if name.startswith("module.")}
