"""Whether a recipe's transforms fit its data: refused before anything is read, on every rank alike."""

from __future__ import annotations

import copy

import torch

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.pixel_transforms import PixelTransforms
from widefield.data.spatial.moves import MOVES
from widefield.data.spatial.volume_moves import VOLUME_MOVES, RandomDepthFlip, VolumeCrop
from widefield.data.transforms import OF_256_LEVELS, Step, Transforms, seeded


def check_transforms(config: DataConfig, dataset: Dataset, *, ignore: int | None, cut: bool) -> list[str]:
    """Sentences of what is slower than it might be: transforms for which ranks read images whole.

    ignore: the task's label of pixels that do not count.  cut: whether ranks read windows of images.
    ValueError, NotImplementedError: transforms that do not fit the dtype or the dims of the images, cannot move labels, or are
    a user's own and would see windows.
    """
    lists = {name: Transforms(getattr(config, name), field=f"data.{name}") for name in ("read", "read_evaluate", "augment")}
    for name, listed in lists.items():
        for step in listed.steps:
            _check_dims(step, name, config, dataset)
            _check_dtype(step, name, config, dataset)
            _check_own(step, name, cut)
            _check_crop(step, name, config, dataset)
            _check_moves_image(step, name, dataset)
            _check_moves_boxes(step, name, dataset)
    if not dataset.moves_as_one:
        return []
    none = Transforms([], field="data.augment")
    train, evaluate = (
        PixelTransforms(
            lists[read],
            augment,
            num_classes=len(dataset.classes),
            ignore=ignore,
            dims=dataset.dims,
            image_scale=dataset.image_scale,
            labelled=dataset.labels != "boxes",
        )
        for read, augment in (("read", lists["augment"]), ("read_evaluate", none))
    )
    whole = dict.fromkeys([*train.looks_at_all, *evaluate.looks_at_all])
    return [f"{', '.join(whole)}: every rank reads images whole, since a pixel depends on others"] if cut and whole else []


def _check_dims(step: Step, name: str, config: DataConfig, dataset: Dataset) -> None:
    """ValueError: transforms of volumes where there are images."""
    if dataset.dims == 2 and isinstance(step.run, VolumeCrop | RandomDepthFlip):
        raise ValueError(
            f"data.{name} has {step.name}{' of three sizes' if isinstance(step.run, VolumeCrop) else ''}, which is for volumes "
            f"(C, D, H, W), and data.name={config.name} has images (C, H, W); give two sizes, or leave it out"
        )


def _check_dtype(step: Step, name: str, config: DataConfig, dataset: Dataset) -> None:
    """ValueError: transforms of torchvision that do not run on images of other dtypes than uint8."""
    moves = step.name in (*MOVES, *VOLUME_MOVES) or isinstance(step.run, ClassBalancedCrop)
    if dataset.dtype == torch.uint8 or step.is_own or moves:
        return
    if dataset.dims == 3 and not step.colours_volumes:  # PixelTransforms says it
        return
    kind = "floating-point numbers" if dataset.floating else f"{str(dataset.dtype).removeprefix('torch.')}"
    if step.keeps_pixels_in_place and step.name not in OF_256_LEVELS:
        _try(step, name, dataset.channels, kind)  # on a plane of a volume
        return
    raise ValueError(
        f"data.{name} has {step.name}, which changes uint8 images, and those of data.name={config.name} are {kind}; let the "
        f"dataset give uint8 (torchvision's PILToTensor in place of ToTensor), or use a transform of your own, as "
        f"package.module:callable, or one that moves pixels, or set data.{name}=[] and let the dataset change its images itself"
    )


def _try(step: Step, name: str, channels: int, kind: str) -> None:
    """Run a transform of colour on numbers from 0 to 1.  ValueError, in torchvision's words: it fails."""
    certain = copy.copy(step.run)
    if hasattr(certain, "p"):
        certain.p = 1.0
    try:
        with seeded(0, torch.device("cpu")):
            certain(torch.zeros(channels, 512, 512))  # a blur's kernel may be twice as large
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"data.{name} has {step.name}, which torchvision cannot run on images of {channels} channels of {kind}, scaled to "
            f"0 to 1: {error}; change its arguments, leave it out, or use a transform of your own, as package.module:callable"
        ) from None


def _check_own(step: Step, name: str, cut: bool) -> None:
    if step.is_own and cut and not step.is_pointwise:
        raise NotImplementedError(
            f"data.{name} has {step.name}, and with mesh.space each rank reads a window, which it would take for the whole "
            "image; if what it makes of a pixel depends on no other pixel and on no place, say so by its attribute "
            "pointwise = True, or leave out mesh.space"
        )


def _check_moves_image(step: Step, name: str, dataset: Dataset) -> None:
    """NotImplementedError: a transform that targets which are images cannot follow."""
    if dataset.image_scale is not None and isinstance(step.run, ClassBalancedCrop):
        raise NotImplementedError(
            f"data.{name} has ClassBalancedCrop, which is centred on a pixel of a class, and here targets are images; use "
            "RandomCrop"
        )
    if dataset.scale > 1 and step.name == "ElasticTransform":
        raise NotImplementedError(
            f"data.{name} has ElasticTransform, whose displacements are drawn for one grid, and targets have {dataset.scale} "
            "times as many pixels along each dim; leave it out"
        )


def _check_moves_boxes(step: Step, name: str, dataset: Dataset) -> None:
    """NotImplementedError: a transform of a user's own, which may move pixels and sees no boxes."""
    if dataset.labels == "boxes" and step.is_own and not step.is_pointwise:
        raise NotImplementedError(
            f"data.{name} has {step.name}, which may move pixels, and the boxes of objects cannot follow it; if it moves none, "
            f"say so by its attribute pointwise = True, or use one of {', '.join(MOVES)}"
        )


def _check_crop(step: Step, name: str, config: DataConfig, dataset: Dataset) -> None:
    if isinstance(step.run, ClassBalancedCrop) and not dataset.pixels:
        raise ValueError(
            f"data.{name} has ClassBalancedCrop, which is centred on a pixel of a class, and data.name={config.name} has no "
            "labels of pixels; use RandomCrop"
        )
