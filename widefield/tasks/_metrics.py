"""Metrics that a recipe adds to those of its task: by a short name, torchmetrics by name, or a user's own callable.

Evaluations are the same on any number of ranks.  So a metric is tried on an example before a run: its states must have an exact
reduction over ranks (sum, max, min or concatenation), and two batches must give the same value as one; where ranks share
images, so must two tiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torchmetrics.classification
import torchmetrics.regression
import torchmetrics.segmentation
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from widefield.config import TaskConfig
from widefield.naming import did_you_mean
from widefield.own_code import call, code_named, is_code, takes
from widefield.tasks import Task, example_of, is_per_pixel, labels_of, values_of
from widefield.tasks._cases import CaseMetric, CaseSizes, SpacingOf
from widefield.tasks._named import CASES_OF, NAMED, names_of

_LIBRARIES = (torchmetrics.classification, torchmetrics.segmentation, torchmetrics.regression)
_KNOWN = {name: getattr(library, name) for library in _LIBRARIES for name in library.__all__}
_OWN_ALONE = {"boxes": "boxes, which have COCO's scores", "views": "from views, which have the task's own metrics"}
ADD_UP = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""The exact reductions of states over ranks."""


@dataclass(frozen=True)
class RecipeMetric:
    """A metric with its name in evaluations.

    make: returns a new one.  of_cases: from the number of images, a new metric of each image by itself; `make` is None then.
    gathers: whether ranks gather the answers of all samples for it, and do not add up sums.  factor: of its value, 100 of a
    share that is in percent as the task's own.
    """

    name: str
    make: Callable[[], Metric] | None = None
    of_cases: Callable[[int], CaseMetric] | None = None
    gathers: bool = False
    factor: int = 1

    def made(self) -> Metric:
        assert self.make is not None, f"{self.name} is a metric of cases"
        return self.make()


def names() -> list[tuple[str, str]]:
    """The names that task.metrics can have: short ones with the kinds of labels that they are for, and torchmetrics'."""
    short: dict[str, list[str]] = {}
    for labels in NAMED:
        for name in names_of(labels):
            short.setdefault(name, []).append(labels)
    own = [(name, f"of {', '.join(kinds)}") for name, kinds in short.items()]
    return own + [(name, kind.__module__.partition(".functional")[0].rpartition(".")[0]) for name, kind in _KNOWN.items()]


def metrics_of(
    config: TaskConfig, task: Task, *, num_classes: int, cut: bool, spacing_of: SpacingOf | None = None
) -> list[RecipeMetric]:
    """The metrics that `task.metrics` lists.  cut: whether ranks share images, so that each updates with its tile.

    spacing_of: the lengths of a pixel of an image by its number, for distances.
    ValueError: an unknown name or argument, two metrics of one name, a callable that returns no metric, values that are no
    numbers.  NotImplementedError: a metric that would depend on the number of ranks.
    """
    if config.metrics and labels_of(task) in _OWN_ALONE:
        raise ValueError(
            f"task.metrics has {config.metrics[0]!r} and the task learns {_OWN_ALONE[labels_of(task)]} alone; leave it out"
        )
    found = [_one(entry, task, num_classes, spacing_of) for entry in config.metrics]
    taken = set(values_of(task.metrics(), *example_of(task, num_classes), name="the task's metrics")) if found else set()
    for metric in found:
        if metric.name in taken:
            raise ValueError(f"task.metrics: there are two metrics of the name '{metric.name}'; leave one out")
        taken.add(metric.name)
        if metric.of_cases is not None:
            metric.of_cases(1)  # refuses wrong arguments
            continue
        _try(metric, task, num_classes, cut=cut)
    return [replace(metric, gathers=_gathers(metric)) for metric in found]


def numbers_of(metric: RecipeMetric, value: Any, *, classes: int = 0) -> dict[str, float]:
    """A metric's value as numbers by name; of one per class, the mean over those that are numbers.

    ValueError: it is neither a number, nor one per class, nor a dict of numbers.
    """
    numbers: dict[str, float] = {}
    for name, one in _by_name(metric, value).items():
        if torch.as_tensor(one).numel() != 1 and not _is_per_class(one, classes):
            raise ValueError(
                f"task.metrics: {name} gives a tensor of shape {tuple(one.shape)}, and an evaluation shows numbers; set its "
                "average, as macro, or let it give a dict of numbers"
            )
        numbers[name] = float(one.double().nanmean()) if _is_per_class(one, classes) else float(one)
    return numbers


def columns_of(metric: RecipeMetric, value: Any, *, classes: int) -> dict[str, list[float]]:
    """Those parts of a metric's value that have a number per class."""
    return {name: one.tolist() for name, one in _by_name(metric, value).items() if _is_per_class(one, classes)}


def _by_name(metric: RecipeMetric, value: Any) -> dict[str, Any]:
    return {f"{metric.name}_{key}": one for key, one in value.items()} if isinstance(value, dict) else {metric.name: value}


def _is_per_class(value: Any, classes: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and len(value) == classes


def _gathers(metric: RecipeMetric) -> bool:
    return metric.make is not None and dim_zero_cat in metric.make()._reductions.values()


def _one(entry: Any, task: Task, num_classes: int, spacing_of: SpacingOf | None) -> RecipeMetric:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1 or not isinstance(next(iter(entry.values())), dict | None):
        raise ValueError(
            f"task.metrics holds {entry!r}; write a name, or one name with its arguments: MulticlassF1Score: {{average: macro}}"
        )
    ((name, options),) = entry.items()
    name, options = str(name), dict(options or {})
    if ranked := re.fullmatch(r"top(\d+)", name):
        name, options = "top", {"k": int(ranked[1])} | options
    labels, ignore = labels_of(task), getattr(task, "ignore_index", None)
    if name in CASES_OF.get(labels, {}):
        of_cases = partial(
            _of_cases, CASES_OF[labels][name], name, num_classes, ignore, labels == "layers", options, spacing_of
        )
        return RecipeMetric(name, of_cases=of_cases)
    make = code_named(name, key="task.metrics") if is_code(name) else _known(name, labels)
    sizes = {"num_classes": num_classes, "num_labels": num_classes, "num_outputs": num_classes, "ignore_index": ignore}
    given = {key: sizes[key] for key in takes(make, *sizes) if sizes[key] is not None}
    shown = f"top{options.get('k', 3)}" if name == "top" else name.rpartition(":")[2]
    return RecipeMetric(shown, partial(_made, make, name, given | options), factor=100 if name == "top" else 1)


def _known(name: str, labels: str) -> Callable[..., Any]:
    short = NAMED.get(labels, {})
    if name in short:
        return short[name]
    if name in _KNOWN:
        return _KNOWN[name]
    raise ValueError(
        f"task.metrics: torchmetrics.classification, segmentation and regression have no '{name}'"
        f"{did_you_mean(name, [*_KNOWN, *names_of(labels)])} The short names for labels of this kind are "
        f"{', '.join(names_of(labels)) or 'none'}. Or write package.module:callable"
    )


def _of_cases(
    make: Callable[..., CaseMetric],
    name: str,
    classes: int,
    ignore: int | None,
    layered: bool,
    options: dict[str, Any],
    spacing_of: SpacingOf | None,
    cases: int,
) -> CaseMetric:
    try:
        return make(CaseSizes(classes, cases, ignore, layered, spacing_of), **options)
    except TypeError as error:
        raise ValueError(f"task.metrics: {name} cannot be made: {error}") from None


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
    fresh = metric.made()
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
    whole = _numbers(metric, [(answers, target)], num_classes)
    for how, parts in _splits(answers, target, cut=cut and is_per_pixel(task)):
        apart = _numbers(metric, parts, num_classes)
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
        yield "two tiles", [(answers[..., :3, :], target[..., :3, :]), (answers[..., 3:, :], target[..., 3:, :])]


def _numbers(metric: RecipeMetric, parts: list[tuple[Tensor, Tensor]], classes: int) -> dict[str, float]:
    fresh = metric.made()
    for answers, target in parts[:-1]:
        values_of(fresh, answers, target, name=f"task.metrics: {metric.name}")
        fresh._computed = None
    values = values_of(fresh, *parts[-1], name=f"task.metrics: {metric.name}")
    return numbers_of(metric, values[""] if set(values) == {""} else values, classes=classes)
