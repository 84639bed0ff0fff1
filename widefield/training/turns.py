"""The turns of a step: one for a model that is one; several where its modules learn by turns, as of a generative network.

All turns of a step see the step's batch.  In a turn one module learns: the others' parameters take no gradient, or, where
what a model sends is fixed at the beginning, theirs is computed and dropped (see freezing.py).  The optimizer is one for all:
it leaves parameters without a gradient as they are, so each module's update has the numbers of an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from widefield.config import RunConfig
from widefield.data.batch import Batch
from widefield.data.transforms import seed_of
from widefield.losses import widened
from widefield.parallel.members import members_of, set_members
from widefield.plans import Plan
from widefield.tasks import Task
from widefield.tiled.api import cut_by
from widefield.tiled.tensor import TiledTensor
from widefield.training.freezing import why_gradients_are_dropped
from widefield.training.running_means import RunningMeans
from widefield.training.second_stage import stages_named

ONE = ("",)
"""The turns of a model that is one."""


@dataclass(frozen=True)
class Turn:
    """member: the name of the module that learns; "" of a model that is one.  after: those that learned before in this step.

    step: counted from 0.  means: those that the task keeps.
    """

    member: str
    after: Sequence[str]
    step: int
    scaler: torch.amp.GradScaler
    means: RunningMeans = field(default_factory=RunningMeans)


def members_named(task: Task) -> Sequence[str]:
    """The names of the modules that learn by turns; () where the model is one."""
    return getattr(task, "members", ())


def turns_of(task: Task, step: int) -> Sequence[str]:
    """The members that learn in a step, counted from 0, in their order."""
    return task.in_turn(step) if members_named(task) else ONE  # type: ignore[attr-defined]


def divide(model: nn.Module, task: Task, *, name: str) -> nn.Module:
    """Tell `model` its members, which are its attributes of these names; returns it.  name: of the model, for the error.

    They are modules that learn by turns, or the two stages of a detector.
    ValueError: it lacks one, or a parameter belongs to none of them or to two.
    """
    stages = stages_named(task)
    names = stages or members_named(task)
    if not names:
        return model
    lacks = [one for one in names if not isinstance(getattr(model, one, None), nn.Module)]
    if lacks:
        trains, instead = ("has two stages", "faster_rcnn") if stages else (f"trains {' and '.join(names)} by turns", "gan")
        raise ValueError(
            f"the task {trains} and model.name={name} gives a {type(model).__name__} without a module '{lacks[0]}'; take "
            f"model.name={instead}, or give a module with the attributes {' and '.join(names)}"
        )
    undivided = stages[1:]  # a second stage is called with as many boxes as images have, which no capture can know
    set_members(model, {one: model.get_submodule(one) for one in names}, undivided=undivided)
    return model


def check_turns(config: RunConfig, task: Task, plan: Plan) -> None:
    """ValueError, NotImplementedError: a choice of the recipe that is for one module and one loss."""
    names = members_named(task)
    if not names:
        return
    taking = f"task.name={config.task.name} trains {' and '.join(names)} by turns"
    of_one = {
        "guard.spike": (config.guard.spike != "off", "off", "their losses rise as the other one learns"),
        "optimizer.lr": (config.optimizer.lr == "find", "a number", "a rate is tried by one loss that falls"),
        "optimizer.name": (config.optimizer.name == "lamb", "adamw", "lamb counts the steps of all parameters together"),
        "gradient.compression": (plan.compression == "powersgd", "none", "its state is of one module's gradients"),
        "model.compile": (config.model.compile, "false", "it compiles the call of one module"),
        "model.auxiliary": (config.model.auxiliary is not None, "null", "it weighs the outputs of one module"),
        "model.deep_supervision": (config.model.deep_supervision, "false", "it weighs the outputs of one module"),
    }
    for key, (is_set, instead, why) in of_one.items():
        if is_set:
            section, _, field = key.partition(".")
            value = getattr(getattr(config, section), field)
            raise ValueError(f"{key}={value} and {taking}, and {why}; set {key}={instead}")
    if plan.stream is not None and plan.stream.memory is not None and getattr(task, "differentiates_twice", False):
        raise ValueError(
            f"stream.memory={plan.stream.memory} and task.name={config.task.name} penalizes gradients, whose backward takes "
            "more than the tiles are chosen for; set stream.tiles, and leave stream.memory out"
        )


@contextmanager
def learning(model: nn.Module, member: str, plan: Plan) -> Iterator[None]:
    """Inside, only this member of the model takes gradients; "": all of the model does."""
    others = [] if why_gradients_are_dropped(plan) is not None else _of_others(model, member)
    stopped = [parameter for parameter in others if parameter.requires_grad]
    for parameter in stopped:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in stopped:
            parameter.requires_grad_(True)


def drop_gradients_of_others(model: nn.Module, member: str) -> None:
    """After the backward passes of a turn: the optimizer leaves parameters without a gradient as they are."""
    for parameter in _of_others(model, member):
        parameter.grad = None


def _of_others(model: nn.Module, member: str) -> list[nn.Parameter]:
    """The parameters of the other members; [] of a model that is one."""
    others = [module for name, module in members_of(model).items() if member and name != member]
    return [parameter for module in others for parameter in module.parameters()]


class Draws:
    """Random numbers of samples in a turn: the same on any number of ranks, and on all ranks that share a sample.

    seeds: of the samples.
    """

    def __init__(self, batch: Batch, turn: Turn, like: Tensor) -> None:
        self._seeds, self._like, self._drawn, self._turn = batch.seeds, like, 0, len(turn.after)

    def _generators(self) -> Iterator[torch.Generator]:
        self._drawn += 1
        for seed in self._seeds:
            yield torch.Generator().manual_seed(seed_of(seed, "turn", self._turn, self._drawn))

    def uniform(self) -> Tensor:
        """(B,) from 0 to 1."""
        return self._stacked([torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators()])

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) with mean 0 and standard deviation 1, whole also where images are tiled."""
        found = [torch.randn(shape, generator=generator, dtype=torch.float32) for generator in self._generators()]
        return self._stacked(found)

    def normal_like(self, images: Tensor) -> Tensor:
        """As `normal`, of the shape of images (B, C, *pixels), and in tiles where these are."""
        found = self.normal(*images.shape[1:])
        return cut_by(found, images.tile_layout) if type(images) is TiledTensor else found

    def _stacked(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack(numbers).to(self._like.device, self._like.dtype)


def loss_of_turn(task: Any, turn: Turn, model: nn.Module, image: Tensor, target: Tensor, batch: Batch) -> Tensor:
    """The sum over this rank's samples of the loss of the member whose turn it is, in float32 or wider."""
    turn.means.of_samples = batch.samples > 0
    more = {"means": turn.means} if turn.means.decays else {}
    loss = task.turn_loss(turn.member, model, image, target, draw=Draws(batch, turn, image), step=turn.step, **more)
    return widened(loss)
