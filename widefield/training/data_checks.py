"""Does the dataset fit the recipe: its task, its transforms, its normalization?"""

from __future__ import annotations

import math

from widefield.config import RunConfig
from widefield.data import BadImageError, Dataset, Labels, spacing_of
from widefield.data.map_style import MapStyle
from widefield.data.transform_checks import check_transforms
from widefield.tasks import Task, labels_of, noise_of
from widefield.training.given import Given


def check_data(config: RunConfig, dataset: Dataset, task: Task, given: Given, *, cut: bool) -> list[str]:
    """Sentences on transforms that make reading slower.  ValueError: data that does not fit the recipe."""
    _check_channels(config, dataset)
    _check_labels(config, dataset, task)
    _check_classes(config, dataset, given)
    _check_spacings(config, dataset)
    return list(check_transforms(config.data, dataset, ignore=getattr(task, "ignore_index", None), cut=cut))


def _check_channels(config: RunConfig, dataset: Dataset) -> None:
    for name, values in (("mean", config.data.mean), ("std", config.data.std)):
        if values is not None and len(values) not in (1, dataset.channels):
            raise ValueError(
                f"data.{name} has {len(values)} numbers and the images have {dataset.channels} channels; give one per channel"
            )
    if config.data.std is None and not all(1e-6 <= value < math.inf for value in dataset.std):
        raise ValueError(
            f"data.name={config.data.name} says that pixels, scaled to 0..1, have the standard deviations {dataset.std}, and "
            "they are divided by these; set data.std to numbers above 0, as [1] for a channel that is the same everywhere"
        )


def _check_classes(config: RunConfig, dataset: Dataset, given: Given) -> None:
    """ValueError: one class only, of which there is nothing to learn.  A user's own task may have another use for it."""
    if len(dataset.classes) == 1 and given.task is None and config.task.name in ("classification", "segmentation"):
        raise ValueError(
            f"data.name={config.data.name} has one class only, '{dataset.classes[0]}', which every answer would be; "
            f"task.name={config.task.name} tells classes apart, so give it two or more"
        )


def _check_spacings(config: RunConfig, dataset: Dataset) -> None:
    """ValueError: distances are wanted, and volumes tell no unit, or some tell a spacing and others none."""
    named = [entry if isinstance(entry, dict) else {entry: {}} for entry in config.task.metrics]
    if dataset.dims != 3 or not any("spacing" not in (one["surface"] or {}) for one in named if "surface" in one):
        return
    cure = "give it one for all volumes, as task.metrics=[{surface: {spacing: [2.5, 1, 1]}}]"
    images = dataset.evaluate
    try:
        told = [spacing_of(images, index) is not None for index in range(len(images))]
    except BadImageError as error:
        raise ValueError(f"task.metrics has surface, whose distances are in mm, and of {error}; or {cure}") from None
    if len(set(told)) > 1:
        raise ValueError(
            f"task.metrics has surface, whose distances are in mm, and {images.name_of(told.index(False))} tells no spacing "
            f"while {images.name_of(told.index(True))} does; {cure}"
        )


def _check_labels(config: RunConfig, dataset: Dataset, task: Task) -> None:
    """ValueError: labels of another kind than the task's, or mixing of images whose pixels have labels."""
    name, learns = config.data.name, labels_of(task)
    if learns == "views":
        _check_views(config, dataset)
    elif learns == "noise":
        _check_real_images(config, dataset, task)
    elif learns != dataset.labels:
        cure = f"set task.name={_TASK_FOR[dataset.labels]}" if dataset.labels in _TASK_FOR else "take a task that learns these"
        raise ValueError(
            f"task.name={config.task.name} learns {_LABELS_IN_WORDS[learns]} and data.name={name} has "
            f"{_LABELS_IN_WORDS[dataset.labels]}; {cure}, or take other data"
        )
    if dataset.labels == "image":
        _check_images(config, dataset, task)
    if dataset.labels == "boxes" and dataset.dims == 3:
        raise NotImplementedError(
            f"data.name={name} has boxes in volumes, and anchors, losses and scores are of images (C, H, W)"
        )
    if not dataset.pixels and dataset.labels != "boxes":
        return
    for field_name in ("mixup", "cutmix"):
        if share := getattr(config.data, field_name):
            raise ValueError(
                f"data.{field_name}={share:g} mixes images of {_LABELS_IN_WORDS['class']} and data.name={name} has "
                f"{_LABELS_IN_WORDS[dataset.labels]}; "
                f"set data.{field_name}=0"
            )


def _check_views(config: RunConfig, dataset: Dataset) -> None:
    """ValueError: views of an image would not differ, would be mixed with others, or would have to move boxes or images."""
    taking = f"task.name={config.task.name} learns from two random views of each image"
    if not config.data.read and not config.data.augment:
        raise ValueError(
            f"data.augment is empty and {taking}, which would be the same; add transforms, as RandomResizedCrop and ColorJitter"
        )
    _check_images_alone(config, dataset, taking, "alone", "alone")


def _check_images_alone(config: RunConfig, dataset: Dataset, taking: str, each: str, all_: str) -> None:
    """ValueError, NotImplementedError: images would be mixed, or have more than a class.

    taking: how the task takes images, in words; each, all_: how these words end, of one image and of the data.
    """
    for field_name in ("mixup", "cutmix"):
        if share := getattr(config.data, field_name):
            raise ValueError(f"data.{field_name}={share:g} mixes images and {taking} {each}; set data.{field_name}=0")
    if dataset.labels in ("boxes", "image"):
        raise NotImplementedError(
            f"data.name={config.data.name} has {_LABELS_IN_WORDS[dataset.labels]} and {taking} {all_}; take data of images "
            "with a class, as imagefolder with all images in one folder"
        )


def _check_real_images(config: RunConfig, dataset: Dataset, task: Task) -> None:
    """ValueError: noise of other dims than images, images that would be mixed, of which there are two, or without a range."""
    taking = f"task.name={config.task.name} makes images of noise"
    noise = noise_of(task, dims=dataset.dims)
    if len(noise) != 1 + dataset.dims:
        raise ValueError(
            f"task.options.noise is {list(noise)} and images have {dataset.dims} dims; give a number, as 64, or channels and "
            f"{dataset.dims} extents, as {[16, *[4] * dataset.dims]}"
        )
    _check_images_alone(config, dataset, taking, "like each", "like the data's")
    _check_range(config, "which what is made is compared with")


def _check_images(config: RunConfig, dataset: Dataset, task: Task) -> None:
    """ValueError: targets are images of another scale than the task's, or pixels have no range that is known beforehand."""
    name, scale = config.data.name, getattr(task, "scale", dataset.scale)
    if scale != dataset.scale:
        raise ValueError(
            f"task.options.scale is {scale} and the targets of data.name={name} have {dataset.scale} times the pixels of their "
            f"inputs along each dim; set task.options.scale={dataset.scale}"
        )
    _check_range(config, "on which PSNR and SSIM depend")


def _check_range(config: RunConfig, why: str) -> None:
    if config.data.intensity.name not in ("range", "window"):
        raise ValueError(
            f"data.intensity={config.data.intensity.name} has no range of pixels that is known beforehand, {why}; "
            "set data.intensity=range, or window with its center and width"
        )


_LABELS_IN_WORDS: dict[Labels, str] = {
    "class": "one class number per image",
    "classes": "any number of classes per image",
    "values": "numbers per image",
    "pixels": "one per pixel",
    "layers": "any number of classes per pixel",
    "image": "images as targets",
    "boxes": "boxes",
    "views": "from views of images",
    "noise": "to make images of noise",
}
_TASK_FOR: dict[Labels, str] = {
    "class": "classification",
    "pixels": "segmentation",
    "image": "restoration",
    "boxes": "detection",
}


def why_scaled(config: RunConfig, dataset: Dataset) -> str | None:
    """The reason for the normalization of a user's own datasets, which have no mean and std."""
    if not isinstance(dataset.train, MapStyle) or config.data.mean is not None or config.data.std is not None:
        return None
    how = "taken as the dataset gives them" if dataset.floating else "scaled to 0..1"
    return f"data.mean={dataset.mean}, data.std={dataset.std}: pixels are {how}, for nothing else was asked"
