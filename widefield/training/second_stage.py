"""Detectors of two stages: what the second one is asked, and when.

The first stage is the model's own forward, cut as the plan says.  Its maps are gathered, and every rank that shares an image
decides for itself, from the same maps and the same draws, which boxes the second stage sees, and runs it on all of them.  So no
rank waits for another's boxes, and gradients of the second stage's weights, the same on these ranks, are averaged as those of
the first.  The stages are parallelized each by itself.  Every pass calls the second one once, whatever it is asked, so that
ranks which hold its weights in parts call it equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from widefield.config import RunConfig
from widefield.detection.targets import sizes_in
from widefield.losses import widened
from widefield.plans import Plan
from widefield.tasks import Task, labels_of
from widefield.tiled.api import whole


def stages_named(task: Task) -> Sequence[str]:
    """The names of the modules that are the model's stages, the first one first; () of a model that is one."""
    return getattr(task, "stages", ())


def completed(
    task: Task,
    model: nn.Module,
    output: Any,
    sizes: Sequence[tuple[int, ...]],
    *,
    autocast: Callable[[], AbstractContextManager],
    target: Tensor | None = None,
    seeds: Sequence[int] = (),
) -> Any:
    """What the model's stages give together, for images of `sizes`; of a model of one stage the output as it is.

    output: of the first stage, whole and in float32 or wider.  target, seeds: of each image, for losses and their draws; None:
    there are no losses.  A model in training finds no boxes.
    """
    names = stages_named(task)
    if not names:
        return output
    second = getattr(model, names[-1])

    def stage(pooled: Tensor) -> Any:
        with autocast():
            found = second(pooled)
        return widened(found)

    asked = {"target": target, "seeds": seeds if target is not None else (), "trains": model.training}
    return task.completed(output, stage, sizes, **asked)  # type: ignore[attr-defined]


def for_loss(
    task: Task,
    model: nn.Module,
    output: Any,
    target: Tensor,
    *,
    autocast: Callable[[], AbstractContextManager],
    seeds: Sequence[int],
) -> Any:
    """What the task's loss is of: the output in float32 or wider; of boxes, which need all places, whole and `completed`."""
    if labels_of(task) != "boxes":
        return widened(output)
    output = widened(whole(output))
    if not stages_named(task):
        return output
    return completed(task, model, output, sizes_in(target), autocast=autocast, target=target, seeds=seeds)


def check_second_stage(config: RunConfig, task: Task, plan: Plan) -> None:
    """ValueError: what a recipe can have of one module only."""
    names = stages_named(task)
    if not names:
        return
    method = f"task.options.method={getattr(config.task, 'options', {}).get('method')}"
    of_one = {
        "model.compile": (config.model.compile, "false", "it compiles the call of one module"),
        "gradient.compression": (plan.compression == "powersgd", "none", "its state is of one module's gradients"),
    }
    for key, (is_set, instead, why) in of_one.items():
        if is_set:
            section, _, field = key.partition(".")
            value = getattr(getattr(config, section), field)
            raise ValueError(f"{key}={value} and {method} has a model of two stages, and {why}; set {key}={instead}")
