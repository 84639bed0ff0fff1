"""Targets of samples, by kind of labels (`Labels`): what is right for an image, and the part in a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widefield.geometry import Interval
from widefield.geometry.box import enlarged, slices


def check_target(name: str, image_CHW: Tensor, target: int | Tensor, *, num_classes: int, ignore: int | None = None) -> None:
    """ValueError: a label is no class number, or the target's size is not that of the image or of the classes.

    image_CHW: or a volume, (C, D, H, W).  name: of the image.  ignore: a label besides the classes, of pixels that do not
        count.
    """
    if isinstance(target, int):
        wrong = [] if 0 <= target < num_classes else [target]
    elif target.ndim == image_CHW.ndim - 1 > 1:
        _check_size(name, target.shape, image_CHW)
        outside = target[(target < 0) | (target >= num_classes)]
        wrong = [label for label in outside.unique().tolist() if label != ignore]
    else:
        _check_layers(name, image_CHW, target, num_classes)
        return
    if wrong:
        raise ValueError(
            f"the label of {name} is {wrong[0]}, outside 0..{num_classes - 1}; mend the label or the number of classes"
        )


def check_target_image(name: str, image: Tensor, target: int | Tensor, *, channels: int, scale: int) -> None:
    """ValueError: the target is no image of so many channels, of the image's dtype and `scale` times its pixels.

    image: (C, *pixels), or a window of it, and target the same window of its target.
    """
    if isinstance(target, int) or target.ndim != image.ndim or len(target) != channels:
        got = "a number" if isinstance(target, int) else f"of shape {tuple(target.shape)}"
        raise ValueError(f"the target of {name} is {got} and an image of {channels} channels is wanted; mend the dataset")
    wanted = tuple(scale * extent for extent in image.shape[1:])
    if tuple(target.shape[1:]) != wanted:
        sizes = [" x ".join(map(str, shape)) for shape in (target.shape[1:], image.shape[1:], wanted)]
        raise ValueError(
            f"the target of {name} is {sizes[0]} pixels and its input {sizes[1]}, which with a scale of {scale} wants "
            f"{sizes[2]}; mend one of them, or the scale"
        )
    if target.dtype != image.dtype:
        raise ValueError(
            f"the target of {name} has pixels of {target.dtype} and its input of {image.dtype}; give both one dtype, since "
            "they are scaled alike"
        )


def degraded(made: Any, image: Tensor, name: str) -> Tensor:
    """What a user's transform made of an image whose target is another image, which stays as it is.

    ValueError: it is of another size or dtype, so that it no longer fits its target.
    """
    if isinstance(made, Tensor) and made.shape == image.shape and made.dtype == image.dtype:
        return made.detach().as_subclass(Tensor)
    got = f"{tuple(made.shape)} of {made.dtype}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
    raise ValueError(
        f"{name} makes {got} of an image {tuple(image.shape)} of {image.dtype}, whose target is an image that it does not see; "
        "keep size and dtype, and move pixels by torchvision's transforms, which move both"
    )


def _check_layers(name: str, image_CHW: Tensor, target: Tensor, num_classes: int) -> None:
    if len(target) != num_classes:
        raise ValueError(f"{name} has {len(target)} labels and the classes are {num_classes}; give one per class")
    if target.ndim > 1:
        _check_size(name, target.shape[1:], image_CHW)
    if target.is_floating_point():
        if not target.isfinite().all():
            raise ValueError(f"the values of {name} are {target.tolist()}; give finite numbers")
    elif target.numel() and int(target.max()) > 1:
        raise ValueError(f"{name} has the label {int(target.max())} where 0 or 1 is wanted for each class; mend the label")


def _check_size(name: str, size: torch.Size, image_CHW: Tensor) -> None:
    if size != image_CHW.shape[1:]:
        sizes = [" x ".join(map(str, shape)) for shape in (size, image_CHW.shape[1:])]
        raise ValueError(f"the labels of {name} are {sizes[0]} pixels and its image is {sizes[1]}; mend one of them")


def part_of(target: int | Tensor, window: tuple[Interval, ...], *, scale: int = 1) -> int | Tensor:
    """The part of labels of pixels that is in the window; a target of a whole image stays.  scale: of a target image.

    >>> part_of(torch.arange(6).view(2, 3), (Interval(1, 2), Interval(0, 2)))
    tensor([[3, 4]])
    """
    if isinstance(target, int) or target.ndim < len(window):
        return target
    return target[..., *slices(enlarged(window, scale))]
