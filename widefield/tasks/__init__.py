"""Tasks: a loss, metrics and answers, one file per task, each with `build(num_classes, **options)` and CASES.

`package.module:callable` is a user's own, called with the same arguments.  Metrics that a recipe adds are in _metrics.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from widefield.config import TaskConfig
from widefield.config.field_types import Labels
from widefield.naming import load
from widefield.own_code import call, code_named, is_code, refuse_object
from widefield.tasks._torchmetrics import MetricCollection, dim_zero_sum
from widefield.tasks._with_loss import with_loss as with_loss


class Task(Protocol):
    """A loss that is a sum and a count, and metrics whose states add up over ranks.  It is independent of ranks."""

    headline: str
    """The metric that is the result, as a key of `metrics()`."""
    higher_is_better: bool
    # further attributes may be set: `labels`, the kind of its targets; `percent = False` where its metrics are no shares;
    # `sums` and `finish`, as widefield.losses.LossOfSums has them; `measures(output, target)`, (B, M) numbers of each image,
    # where metrics are no sums over pixels: these are then updated by `add(measures)`, which ranks of an image make together;
    # of boxes, `found(output, sizes)`, what is found in each image: metrics have lists as states, which ranks gather, and are
    # updated with the images' numbers, what is found and the targets

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the loss over samples (or pixels), a scalar."""

    def count(self, target: Tensor) -> int | Tensor:
        """The number of samples (or pixels) in that sum."""

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """(B,) the loss of each sample, the mean over its pixels where there are several; to find the worst."""

    def metrics(self) -> MetricCollection:
        """New metrics from 0 to 1, updated with `(answers(output), target)`; every state is reduced by sum."""

    def answers(self, output: Tensor) -> Tensor:
        """What metrics and users get: (B, num_classes) probabilities or, per pixel, (B, *pixels) class numbers."""

    def sentence(self, values: dict[str, float]) -> str:
        """The result for the log, as `98.61 % top-1`.  values: the metrics in percent."""


class AlternatingTask(Task, Protocol):
    """A task whose model has several modules that learn by turns, as a generator and a discriminator.

    All turns of a step see one batch.  `loss_sum`, `count`, `answers` and the metrics are of evaluations, in which the model is
    called as a whole.
    """

    members: Sequence[str]
    """The names of these modules, which are attributes of the model and have all of its parameters."""
    # `differentiates_twice = True` may be set where a loss has gradients in it; `running_means`, by name how far a step moves
    # each mean over samples that the task keeps: `turn_loss` then gets `means`, see SampleMeans

    def in_turn(self, step: int) -> Sequence[str]:
        """The members that learn in a step, counted from 0, in their order."""

    def example(self, member: str, image: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """What the member is called with, given a batch; also of tensors without data, for their shapes."""

    def turn_loss(self, member: str, model: Any, image: Tensor, target: Tensor, *, draw: SampleDraws, step: int) -> Tensor:
        """The sum over samples of the loss of the member whose turn it is, a scalar; the others take no gradient.

        image, target: as a batch has them, tiled where images are cut.  Call the members, as `model.generator(image)`, and
        not what is in them.
        """


class SampleDraws(Protocol):
    """Random numbers of the samples of a turn: the same on any number of ranks, and on all ranks that share a sample."""

    def uniform(self) -> Tensor:
        """(B,) from 0 to 1."""

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) with mean 0 and standard deviation 1, whole also where images are tiled."""

    def normal_like(self, images: Tensor) -> Tensor:
        """The same, of the shape of images (B, C, *pixels), and in tiles where these are."""


class SampleMeans(Protocol):
    """Means over the samples of many steps, the same on any number of ranks, 0 before the first step."""

    def value(self, name: str) -> Tensor:
        """As it was before this step, a number."""

    def add(self, name: str, values: Tensor) -> None:
        """values: (B,) of the samples.  After the step the mean is moved towards that of the whole batch."""


def labels_of(task: Task) -> Labels:
    """What the task learns: its attribute `labels`; without it "pixels" where it has `pixels = True`, else "class"."""
    return getattr(task, "labels", "pixels" if getattr(task, "pixels", False) else "class")


def is_per_pixel(task: Task) -> bool:
    """Whether targets have labels, or values, for every pixel, and not for every image."""
    return labels_of(task) in ("pixels", "layers", "image", "noise")


def views_of(task: Task) -> int:
    """How many views of each image a task learns from: 2 of one that learns without labels, 1 of others."""
    return 2 if labels_of(task) == "views" else 1


def noise_of(task: Task, *, dims: int) -> tuple[int, ...]:
    """(Z, *extents) of the noise that the model makes an image of, of a task that has images of noise; () of others.

    dims: of the images' pixels.  Noise of Z numbers is a map of one pixel.
    """
    asked = tuple(getattr(task, "noise", ())) if labels_of(task) == "noise" else ()
    return asked + (1,) * dims if len(asked) == 1 else asked


def channels_of_output(task: Task, *, classes: int, channels: int) -> int:
    """How many channels a model's output has: that of the classes, or of an image that is made of noise that of the images'."""
    return channels if labels_of(task) == "noise" else classes


def scale_of(task: Task) -> int:
    """Of a task whose targets are images, how many of their pixels an input's pixel is along each dim; 1 of others."""
    return getattr(task, "scale", 1) if labels_of(task) == "image" else 1


def build(config: TaskConfig, *, num_classes: int) -> Task:
    """The task that a config names, with the loss that it names; its class weights need the data, see `with_loss`.

    ValueError: there is none, it does not take the options, a user's callable returns no Task, or the loss does not fit it.
    """
    return with_loss(_task_named(config, num_classes), config)


def _task_named(config: TaskConfig, num_classes: int) -> Task:
    refuse_object(config.name, key="task.name", keyword="task")
    if is_code(config.name):
        make = code_named(config.name, key="task.name")
        task = call(make, num_classes, options=config.options, key="task.options", name=config.name)
        return checked(task, name=f"task.name={config.name}", num_classes=num_classes)
    module = load("widefield.tasks", config.name)
    try:
        return module.build(num_classes, **config.options)
    except TypeError as error:
        raise ValueError(f"task.options {config.options} do not fit '{config.name}': {error}") from None


def checked(task: Any, *, name: str, num_classes: int) -> Task:
    """Return a user's own task after checking it.  name: for the error.

    ValueError: it lacks an attribute, or its metrics cannot be updated with answers.
    NotImplementedError: a metric that would depend on the number of ranks.
    """
    methods = ("loss_sum", "count", "loss_each", "metrics", "answers", "sentence")
    lacks = [method for method in methods if not callable(getattr(task, method, None))]
    lacks += [value for value in ("headline", "higher_is_better") if not hasattr(task, value)]
    if isinstance(task, type) or lacks:
        what = f"the class {task.__name__}" if isinstance(task, type) else f"a {type(task).__name__}, which lacks {lacks[0]}"
        raise ValueError(
            f"{name} gives {what}; an object with {', '.join(methods)}, headline and higher_is_better is wanted, see "
            "widefield.tasks.Task"
        )
    if labels_of(task) == "boxes":
        raise NotImplementedError(
            f"{name} learns boxes, and that is the task detection's alone; take it, with a model of your own and task.options"
        )
    metrics = task.metrics()
    if not isinstance(metrics, MetricCollection):
        raise ValueError(f"the metrics of {name} are a {type(metrics).__name__}; a torchmetrics.MetricCollection is wanted")
    for metric in metrics.values():
        for state, reduce in metric._reductions.items():
            if reduce is not dim_zero_sum:
                raise NotImplementedError(
                    f"the state '{state}' of {type(metric).__name__}, of {name}, does not add up over ranks (its reduction is "
                    f"{reduce}); use a metric whose states are sums, or list it in task.metrics"
                )
    values = values_of(metrics, *example_of(task, num_classes), name=f"the metrics of {name}")
    if task.headline not in values:
        raise ValueError(
            f"{name} says that its result is '{task.headline}' and its metrics give {', '.join(map(str, values))}; "
            "let headline name one of them"
        )
    return task


def example_of(task: Task, num_classes: int) -> tuple[Tensor, Tensor]:
    """Example answers and targets for the metrics of a task, the same in each call; every class occurs in the targets.

    (B, num_classes) probabilities and (B,) class numbers, of several classes (B, num_classes) of 0 and 1; numbers both; per
    pixel, (B, H, W) class numbers both, or (B, num_classes, H, W) of 0 and 1, or from 0 to 1 of images; (B, 2, D) of views.
    """
    generator = torch.Generator().manual_seed(0)
    labels = labels_of(task)
    if labels == "pixels":
        shape = (4, 8, -(-num_classes // 8) + 1)
        target = (torch.arange(shape[1] * shape[2]) % num_classes).view(1, *shape[1:]).expand(shape).clone()
        return torch.randint(num_classes, shape, generator=generator), target
    count = max(8, 2 * num_classes)
    if labels == "views":
        return torch.randn(count, 2, 8, generator=generator), torch.zeros(count)
    if labels == "layers":
        return tuple(torch.randint(2, (4, num_classes, 8, 5), generator=generator, dtype=torch.uint8) for _ in range(2))
    if labels in ("image", "noise"):
        return tuple(torch.rand(4, num_classes, 8, 7, generator=generator) for _ in range(2))
    if labels == "values":
        return tuple(torch.randn(count, num_classes, generator=generator) for _ in range(2))
    if labels == "classes":
        return torch.rand(count, num_classes, generator=generator), torch.arange(count * num_classes).view(count, -1) % 3 % 2
    return torch.rand(count, num_classes, generator=generator).softmax(1), torch.arange(count) % num_classes


def values_of(metrics: Any, answers: Tensor, target: Tensor, *, name: str) -> dict[str, Any]:
    """The values of metrics updated with these answers, by name.  ValueError: they cannot be.  name: for the error.

    Without torchmetrics' reduction over ranks, since other ranks may not be here.
    """
    try:
        for part in metrics.modules():
            part._to_sync = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics may warn of the example
            metrics.update(answers, target)
            values = metrics.compute()
    except Exception as error:
        shapes = [tuple(tensor.shape) for tensor in (answers, target)]
        raise ValueError(
            f"{name} cannot be updated with answers of {shapes[0]} and targets of {shapes[1]}: {type(error).__name__}: {error}"
        ) from None
    return dict(values) if isinstance(values, dict) else {"": values}


def output_of(task_name: str, output: Any, *, batch: int, classes: int, pixels: bool = False) -> Tensor:
    """Return the output, a tensor of (batch, classes), or (batch, classes, ...) with `pixels`; ValueError for any other."""
    if isinstance(output, torch.Tensor) and output.shape[:2] == (batch, classes) and (output.ndim > 2) == pixels:
        return output
    wanted = f"({batch}, {classes}{', ...' if pixels else ''})"
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    raise ValueError(
        f"task '{task_name}' wants an output of shape {wanted} and the model gave {got}; "
        "take a model that answers so, set its number of classes, or switch auxiliary outputs off in model.options"
    )


def output_of_pixels(task_name: str, output: Any, *, batch: int, classes: int, pixels: Sequence[int]) -> Tensor:
    """Return the output, a tensor of (batch, classes, *pixels).  ValueError: it has another shape."""
    output = output_of(task_name, output, batch=batch, classes=classes, pixels=True)
    if output.shape[2:] != tuple(pixels):
        wanted, got = (" x ".join(map(str, shape)) for shape in (pixels, output.shape[2:]))
        raise ValueError(
            f"the labels are {wanted} pixels and the model answers for {got}; "
            "take a model that keeps the image's size (unet), or resize its output at its end"
        )
    return output
