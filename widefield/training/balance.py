"""The task of a run with its loss; class weights of the loss and weights of samples, from the training split.

Each rank reads an even share of the split, so counting takes the time of one epoch of reading at most, and the result is the
same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from widefield import tasks
from widefield.comm.mesh import Mesh
from widefield.config import RunConfig
from widefield.data import Dataset
from widefield.data.counts import class_counts, classes_of
from widefield.geometry import even_cut, parts_of
from widefield.losses import DEFAULTS
from widefield.plans import Plan
from widefield.tasks import Task
from widefield.training.given import Given

MOST_SHOWN = 10
"""The most classes that a reason names."""


def task_of(config: RunConfig, given: Given, dataset: Dataset, mesh: Mesh) -> tuple[Task, str | None]:
    """The task with its loss, and the reason of class weights that were computed.  Every rank calls it."""
    classes = len(dataset.classes)
    if given.task is None:
        asked = config.task.model_copy(update={"loss": None, "loss_options": {}})
        plain = tasks.build(asked, num_classes=classes)
        if (outputs := tasks.channels_of_output(plain, classes=classes, channels=dataset.channels)) != classes:
            plain = tasks.build(asked, num_classes=outputs)
    else:
        plain = tasks.checked(given.task, name=f"task={config.task.name}", num_classes=classes)
    if not len(dataset.train):  # only a run's metadata is known, and prediction has no loss
        return plain, None
    ignore = getattr(plain, "ignore_index", None)
    weights, why = class_weights_of(config, dataset, mesh, labels=tasks.labels_of(plain), ignore=ignore)
    return tasks.with_loss(plain, config.task, given=given.loss, weights=weights), why


def check_stages(task: Task, config: RunConfig, mesh: Mesh) -> None:
    """NotImplementedError: a loss that is finished from the sums of a pass, in a pipeline, which has one per micro-batch,
    or one of boxes; or a loss with a network of its own, in a stream.
    """
    _check_network_of_loss(task, config, mesh.plan)
    stages = mesh.plan.stage
    if stages > 1 and tasks.labels_of(task) == "boxes":
        raise NotImplementedError(
            f"task.name={config.task.name} wants the maps of all levels, and the last of the {stages} stages of mesh.stage "
            "gives one tensor; set mesh.stage=1, and cut images by mesh.space in its place"
        )
    if stages > 1 and getattr(task, "finish", None) is not None and not getattr(task, "members", ()):
        loss = config.task.loss or DEFAULTS[tasks.labels_of(task)]
        raise NotImplementedError(
            f"task.loss={loss} is computed from all images of a pass together, and the {stages} stages of "
            "mesh.stage work on a few of them at a time; set mesh.stage=1, or take a loss of each image, as task.loss=dice"
        )


def _check_network_of_loss(task: Task, config: RunConfig, plan: Plan) -> None:
    """NotImplementedError: a loss with a network of its own, which would hold maps of whole images that a stream does not."""
    if plan.stream is not None and getattr(getattr(task, "loss", None), "runs_network", False):
        raise NotImplementedError(
            f"the model runs in a stream and task.loss={config.task.loss} runs a network of its own on what leaves it, whole "
            "images with all their maps at once; cut images by mesh.space, which cuts these too, or leave the loss out"
        )


def class_weights_of(
    config: RunConfig, dataset: Dataset, mesh: Mesh, *, labels: str, ignore: int | None
) -> tuple[Tensor | None, str | None]:
    """(classes,) weights, None where none are asked for, and the reason of what was computed.  Every rank calls it.

    ValueError: they do not fit the classes.
    """
    asked, names = config.task.class_weights, dataset.classes
    if asked is None:
        return None, None
    if labels in ("values", "image", "boxes", "views", "noise"):
        why = {"values": "numbers, which have no classes", "image": "images, which have no classes", "views": "without labels",
               "noise": "images, which have no classes"}  # fmt: skip
        told = why.get(labels, "boxes, whose losses weigh classes by alpha alone")
        raise ValueError(f"task.class_weights is {asked} and the task learns {told}; leave it out")
    if asked == "balanced":
        return _balanced_weights(config, dataset, mesh, labels=labels, ignore=ignore)
    if isinstance(asked, dict):
        unknown = [name for name in asked if name not in names]
        if unknown:
            raise ValueError(
                f"task.class_weights names '{unknown[0]}' and the classes are {', '.join(names[:20])}; mend the name"
            )
        asked = [asked.get(name, 1.0) for name in names]
    if len(asked) != len(names) or not sum(asked) > 0:
        raise ValueError(
            f"task.class_weights has {len(asked)} numbers that add up to {sum(asked):g} and there are {len(names)} classes; "
            "give one for each, some of them above 0"
        )
    return torch.tensor(asked, dtype=torch.float64), None


def _balanced_weights(
    config: RunConfig, dataset: Dataset, mesh: Mesh, *, labels: str, ignore: int | None
) -> tuple[Tensor | None, str | None]:
    """all / (classes x those of the class) or, of several classes, those without it / those with it.

    A class without any has 1.
    """
    images, names = dataset.train, dataset.classes

    def counted(indices: range) -> Tensor:
        skip = config.data.bad_images == "skip"
        return class_counts(images, indices, labels=labels, classes=len(names), ignore=ignore, skip=skip)

    *counts, total = mesh.sum_(_of_share(counted, len(images), mesh)).tolist()
    if labels in ("classes", "layers"):
        weights = [(total - count) / count if 0 < count < total else 1.0 for count in counts]
    else:
        weights = [total / (len(names) * count) if count else 1.0 for count in counts]
    unit = "pixels" if labels in ("pixels", "layers") else "samples"
    rows = list(zip(names, weights, counts, strict=True))
    shown = ", ".join(f"{name} {weight:.4g} ({count:,} {unit})" for name, weight, count in rows[:MOST_SHOWN])
    more = f" and {len(rows) - MOST_SHOWN} more" if len(rows) > MOST_SHOWN else ""
    return torch.tensor(weights, dtype=torch.float64), f"task.class_weights=balanced: {shown}{more}"


def sample_weights_of(config: RunConfig, dataset: Dataset, mesh: Mesh, *, labels: str) -> Tensor | None:
    """(samples,) float64: how much more often than others a sample is drawn; None where each is read once per epoch.

    balanced: every class is drawn equally often; of several classes, a sample weighs as much as its classes together, and those
    without any are a class of their own.  Every rank calls it.
    ValueError: see check_sampling.
    """
    asked, images = config.data.sampling, dataset.train
    check_sampling(config, dataset, labels=labels)
    if asked is None:
        return None
    if asked == "weights":
        return _weights_of_samples(dataset)

    def present(indices: range) -> Tensor:
        found = classes_of(images, indices, labels=labels, classes=len(dataset.classes), skip=config.data.bad_images == "skip")
        whole = torch.zeros(len(images), len(dataset.classes), dtype=torch.uint8)
        whole[indices.start : indices.stop] = found
        return whole

    table = mesh.sum_(_of_share(present, len(images), mesh)).cpu()
    return balanced(table)


def check_sampling(config: RunConfig, dataset: Dataset, *, labels: str) -> None:
    """ValueError: no weights, or no numbers of 0 or more; data that is read by blocks; samples have no classes to balance."""
    if config.data.sampling == "weights":
        if getattr(dataset.train, "weight_of", None) is None:
            raise ValueError(
                f"data.sampling=weights and data.name={config.data.name} has no weights of samples; take a manifest with a "
                "column of weights, or data.sampling=balanced"
            )
        _weights_of_samples(dataset)
    if config.data.sampling is not None and getattr(dataset.train, "blocks", None) is not None:
        raise ValueError(
            f"data.sampling={config.data.sampling} draws samples from everywhere, and data.options.shuffle keeps neighbours "
            "together; leave one of them out"
        )
    if config.data.sampling == "balanced" and labels not in ("class", "classes"):
        cure = "or crops that are drawn by class" if labels in ("pixels", "layers") else "or data.sampling=weights"
        raise ValueError(
            f"data.sampling=balanced draws samples by their class and the labels of data.name={config.data.name} are "
            f"'{labels}'; take task.class_weights=balanced, task.loss=dice_cross_entropy, {cure}"
        )


def balanced(table: Tensor) -> Tensor:
    """(samples,) weights from (samples, classes) of 0 and 1: the sum over a sample's classes of 1 / the class's samples."""
    rows = torch.cat([table, (table.sum(1, keepdim=True) == 0).to(table.dtype)], dim=1).double()
    return (rows / rows.sum(0).clamp(min=1)).sum(1)


def _weights_of_samples(dataset: Dataset) -> Tensor:
    of = dataset.train.weight_of  # type: ignore[attr-defined]
    weights = torch.tensor([float(of(index)) for index in range(len(dataset.train))], dtype=torch.float64)
    wrong = (~((weights >= 0) & weights.isfinite())).nonzero().flatten().tolist()
    if wrong or not weights.sum() > 0:
        where = f"that of {dataset.train.name_of(wrong[0])} is {float(weights[wrong[0]])}" if wrong else "they are all 0"
        raise ValueError(f"data.sampling=weights wants weights of 0 or more, some above 0, and {where}; mend the manifest")
    return weights


def _of_share(work: Callable[[range], Tensor], samples: int, mesh: Mesh) -> Tensor:
    """`work` on this rank's even share of the samples, on the mesh's device.  AgreedError, on every rank: it fails on one."""
    mine = parts_of(even_cut(samples, mesh.size))[mesh.rank]
    found, problem = None, None
    try:
        found = work(range(mine.start, mine.stop))
    except ValueError as error:
        problem = str(error)
    mesh.agree(problem)
    assert found is not None, "a rank without a problem has counted"
    return found.to(mesh.device)
