"""Metrics that a recipe adds to those of its task: torchmetrics by name, or a callable of the user's own that makes one.

Evaluations are the same on any number of ranks.  So a metric is tried on an example before a run: its states must have an exact
reduction over ranks (sum, max, min or concatenation), and two batches must give the same value as one; where ranks share
images, so must two tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics.classification
import torchmetrics.segmentation
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from widefield.config import TaskConfig
from widefield.naming import did_you_mean
from widefield.own_code import call, code_named, is_code, takes
from widefield.tasks import Task, example_of, is_per_pixel, values_of

_LIBRARIES = (torchmetrics.classification, torchmetrics.segmentation)
_KNOWN = {name: getattr(library, name) for library in _LIBRARIES for name in library.__all__}
ADD_UP = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""The exact reductions of states over ranks."""


@dataclass(frozen=True)
class RecipeMetric:
    """A metric with its name in evaluations.  make: returns a new one."""

    name: str
    make: Callable[[], Metric]


def metrics_of(config: TaskConfig, task: Task, *, num_classes: int, cut: bool) -> list[RecipeMetric]:
    """The metrics that `task.metrics` lists.  cut: whether ranks share images, so that each updates with its tile.

    ValueError: an unknown name or argument, two metrics of one name, a callable that returns no metric, values that are no
    numbers.  NotImplementedError: a metric that would depend on the number of ranks.
    """
    found = [_one(entry, task, num_classes) for entry in config.metrics]
    taken = set(values_of(task.metrics(), *example_of(task, num_classes), name="the task's metrics")) if found else set()
    for metric in found:
        if metric.name in taken:
            raise ValueError(f"task.metrics: there are two metrics of the name '{metric.name}'; leave one out")
        taken.add(metric.name)
        _try(metric, task, num_classes, cut=cut)
    return found


def numbers_of(metric: RecipeMetric, value: Any) -> dict[str, float]:
    """A metric's value as numbers by name.  ValueError: it is neither a number nor a dict of numbers."""
    values = {f"{metric.name}_{key}": one for key, one in value.items()} if isinstance(value, dict) else {metric.name: value}
    for name, one in values.items():
        if torch.as_tensor(one).numel() != 1:
            raise ValueError(
                f"task.metrics: {name} gives a tensor of shape {tuple(one.shape)}, and an evaluation shows numbers; set its "
                "average, as macro, or let it give a dict of numbers"
            )
    return {name: float(one) for name, one in values.items()}


def _one(entry: Any, task: Task, num_classes: int) -> RecipeMetric:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1 or not isinstance(next(iter(entry.values())), dict | None):
        raise ValueError(
            f"task.metrics holds {entry!r}; write a name, or one name with its arguments: MulticlassF1Score: {{average: macro}}"
        )
    ((name, options),) = entry.items()
    if is_code(str(name)):
        make = code_named(name, key="task.metrics")
    elif name in _KNOWN:
        make = _KNOWN[name]
    else:
        raise ValueError(
            f"task.metrics: torchmetrics.classification and torchmetrics.segmentation have no '{name}'"
            f"{did_you_mean(str(name), _KNOWN)} Or write package.module:callable"
        )
    sizes = {"num_classes": num_classes, "ignore_index": getattr(task, "ignore_index", None)}
    given = {key: sizes[key] for key in takes(make, *sizes) if sizes[key] is not None}
    return RecipeMetric(str(name).rpartition(":")[2], partial(_made, make, str(name), given | (options or {})))


def _made(make: Callable[..., Any], name: str, options: dict[str, Any]) -> Metric:
    try:
        metric = call(make, options=options, key="its arguments", name=name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task.metrics: {name} cannot be made: {error}") from None
    if not isinstance(metric, Metric):
        raise ValueError(f"task.metrics: {name} gives a {type(metric).__name__}; a torchmetrics.Metric is wanted")
    return metric


def _try(metric: RecipeMetric, task: Task, num_classes: int, *, cut: bool) -> None:
    """NotImplementedError: the metric would depend on the number of ranks; see the module's docstring."""
    fresh = metric.make()
    inner = [type(part).__name__ for part in fresh.modules() if isinstance(part, Metric)][1:]
    if inner:
        raise NotImplementedError(
            f"task.metrics: {metric.name} is made of others ({inner[0]}), whose states are not looked after; list those "
            "themselves"
        )
    for state, reduce in fresh._reductions.items():
        if reduce not in ADD_UP or (isinstance(getattr(fresh, state), list) and reduce is not dim_zero_cat):
            raise NotImplementedError(
                f"task.metrics: the state '{state}' of {metric.name} does not add up over ranks (its reduction is {reduce}); "
                "use a metric whose states are sums, largest or smallest values, or lists"
            )
    answers, target = example_of(task, num_classes)
    whole = _numbers(metric, [(answers, target)])
    for how, parts in _splits(answers, target, cut=cut and is_per_pixel(task)):
        apart = _numbers(metric, parts)
        for name, value in whole.items():
            if not torch.allclose(*(torch.tensor([one]).double() for one in (value, apart[name])), rtol=1e-5, equal_nan=True):
                raise NotImplementedError(
                    f"task.metrics: {name} gives {value:.6g} for a made-up example at once and {apart[name]:.6g} for the same "
                    f"in {how}, so it would change with the number of ranks; use a metric whose states add up"
                )


def _splits(answers: Tensor, target: Tensor, *, cut: bool) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    first = len(answers) // 3
    yield "two batches", [(answers[:first], target[:first]), (answers[first:], target[first:])]
    if cut:
        yield "two tiles", [(answers[:, :3], target[:, :3]), (answers[:, 3:], target[:, 3:])]


def _numbers(metric: RecipeMetric, parts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    fresh = metric.make()
    for answers, target in parts[:-1]:
        values_of(fresh, answers, target, name=f"task.metrics: {metric.name}")
        fresh._computed = None
    values = values_of(fresh, *parts[-1], name=f"task.metrics: {metric.name}")
    return numbers_of(metric, values[""] if set(values) == {""} else values)
