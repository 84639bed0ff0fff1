"""The model of a run, before it is parallelized."""

from __future__ import annotations

import torch
from torch import nn

from widefield import models
from widefield.comm.mesh import Mesh
from widefield.config import RunConfig
from widefield.data import Dataset
from widefield.own_code import is_code
from widefield.tasks import Task, channels_of_output, labels_of, noise_of
from widefield.training.arithmetic import Arithmetic
from widefield.training.given import Given
from widefield.training.running_means import register_means
from widefield.training.streaming import stream_as, streamed_of
from widefield.training.turns import divide


def built_model(
    config: RunConfig,
    mesh: Mesh,
    given: Given,
    arithmetic: Arithmetic,
    dataset: Dataset,
    *,
    channels_last: bool,
    initial: bool,
    task: Task,
) -> tuple[nn.Module, list[str]]:
    """The model on the device, in the memory format that the config asks for, and what was loaded into it, in words.

    initial: load the weights that the config starts from, those of a file over those of a library.
    """
    asked, reasons = config.model, list[str]()
    model = given.model_copy()
    if model is None:
        _check_takes_views(config, task)
        noise = noise_of(task, dims=dataset.dims)
        outputs = channels_of_output(task, classes=len(dataset.classes), channels=dataset.channels)
        shape = {"in_channels": noise[0] if noise else dataset.channels, "num_classes": outputs, "dims": dataset.dims}
        model = models.build(asked, **shape, from_noise=bool(noise), pretrained=initial, reasons=reasons)
    elif asked.auxiliary is not None or asked.deep_supervision:
        models.keep_main_output(model, auxiliary=True)
    divide(model, task, name=asked.name)
    model.to(mesh.device, arithmetic.dtype)
    register_means(model, task, mesh.device)
    gathers = mesh.plan.shard > 1 and mesh.plan.sharding.zero > 1
    if channels_last and (asked.channels_last or not gathers):  # FSDP2 would make weights row-major again
        _lay_channels_last(model)
    if initial:
        reasons += models.load_weights_file(asked, model)
    if mesh.plan.stream is not None:
        for member in streamed_of(model, task):
            stream_as(mesh.plan.stream, member, compiles=asked.compile)
    return model, reasons


def _check_takes_views(config: RunConfig, task: Task) -> None:
    """ValueError: a network of images, where the task learns from views of them, whose channels are joined."""
    name = config.model.name
    if labels_of(task) == "views" and name != "self_supervised" and not is_code(name):
        raise ValueError(
            f"task.name={config.task.name} learns from two views of each image at a time and model.name={name} takes one "
            f"image; set model.name=self_supervised and model.options.backbone={name}"
        )


def _lay_channels_last(model: nn.Module) -> None:
    """In place, weights of convolutions over images and over volumes; nn.Module.to takes a network of one kind alone."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim in formats:
            tensor.data = tensor.data.to(memory_format=formats[tensor.ndim])
