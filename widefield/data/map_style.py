"""A user's own map-style datasets (torch.utils.data.Dataset) as the two splits of a run.

A sample is a pair.  The first is the image: a tensor (C, H, W), or a volume (C, D, H, W), uint8, uint16, int16 or
floating-point, or a PIL image.  The second is the target, of one of these kinds (`Labels`):

    class    a class number
    classes  (K,) integers or bools, 1 for each class that the image has
    values   a floating-point number, or (K,) of them, for regression
    pixels   (H, W) class numbers, one for every pixel, or a PIL image of them; (D, H, W) of a volume
    layers   (K, H, W) integers or bools, 1 where a pixel has the class; (K, D, H, W) of a volume
    boxes    a dict as of torchvision's detectors: boxes (N, 4) as x1, y1, x2, y2, labels (N,), perhaps iscrowd and area

Integer images are treated as those of the packaged formats: data.read, data.augment, scaled to 0..1, normalized.
Floating-point images are used as they are, or as (value - mean) / std where the recipe sets these.
A dataset of volumes may have `spacing`, the lengths of a voxel along D, H and W, or `spacing_of(index)`, those of one volume.

A dataset may use random numbers of Python's, NumPy's or torch's generator.  They depend on the run's seed, the epoch and the
sample only: the generators are seeded for each sample, and restored after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from widefield.data import BadImageError, Dataset, Labels
from widefield.data.image import tensor_of
from widefield.data.intensity import in_words, limits_of
from widefield.data.transforms import all_seeded
from widefield.detection.targets import rows_of

INTEGERS = (torch.uint8, torch.uint16, torch.int16)
"""The dtypes of images besides floating-point ones."""


@dataclass(frozen=True)
class MapStyle:
    """One split.  All samples have the dtype, the channels, the dims and the kind of labels of the first one.

    dtype: floating-point images may have any floating dtype.  dims: of pixels, 2 or 3.
    """

    samples: Any
    split: str
    dtype: torch.dtype
    channels: int
    labels: Labels
    shown: tuple[float, float] = (0.0, 255.0)
    """The pixel values that a thumbnail shows as black and as white."""
    dims: int = 2
    is_random: bool = True
    """Tells the reader to seed all generators before each `read`."""

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        """See data.Images.  ValueError: the sample is of another kind than the first one."""
        image, target = _sample(self.samples, index, self.name_of(index))
        for what, own, first in (
            ("pixels", in_words(image.dtype), in_words(self.dtype)),
            ("dims", image.ndim - 1, self.dims),
            ("channels", len(image), self.channels),
            ("labels", kind_of(target, image.ndim - 1), self.labels),
        ):
            if own != first:
                raise ValueError(
                    f"{self.name_of(index)} differs from the first image: {what}: {own}, there {first}; let the dataset give "
                    "all samples the same"
                )
        return image, target

    def name_of(self, index: int) -> str:
        return f"{self.split}[{index}]"

    def spacing_of(self, index: int) -> tuple[float, ...] | None:
        """The lengths of a voxel along each dim; None where the dataset does not tell.

        ValueError: not one length above 0 for each dim.
        """
        of = getattr(self.samples, "spacing_of", None)
        given = getattr(self.samples, "spacing", None) if of is None else of(index)
        if given is None:
            return None
        lengths = tuple(float(length) for length in given)
        if len(lengths) != self.dims or not all(0 < length < math.inf for length in lengths):
            raise ValueError(
                f"{self.name_of(index)} has the spacing {list(lengths)}; give a length above 0 for each of its {self.dims} dims"
            )
        return lengths


def kind_of(target: int | Tensor, dims: int) -> Labels:
    """The kind of labels that a target is.  dims: of the image's pixels."""
    if isinstance(target, int):
        return "class"
    if target.is_floating_point():
        return "boxes" if target.ndim == 2 else "values"
    return "classes" if target.ndim == 1 else "pixels" if target.ndim == dims else "layers"


def dataset_of(train: Any, evaluate: Any, *, classes: Sequence[str] | int | None = None) -> Dataset:
    """Two map-style datasets as the data of a run; the first sample of each is read.

    classes: names, in the order of class numbers, or their number; None: the attribute `classes` of `train`.
    mean and std are 0 and 1 unless the recipe sets them.
    ValueError: no map-style dataset, an empty one, two datasets of different kinds, or no classes.
    """
    firsts = [_opened(samples, split) for samples, split in ((train, "train"), (evaluate, "evaluate"))]
    one, other = firsts
    if _described(one) != _described(other):
        raise ValueError(
            f"the two datasets differ: {_described(one)} to train on and {_described(other)} to evaluate; let both give "
            "the same kind"
        )
    names = _class_names(train, evaluate, classes)
    in_memory = all(isinstance(samples, TensorDataset | list) for samples in (train, evaluate))
    zeros, ones = [0.0] * one.channels, [1.0] * one.channels
    return Dataset(one, other, names, one.channels, zeros, ones, in_memory, one.labels, one.dtype, dims=one.dims)


def image_of(image: Any, name: str) -> Tensor:
    """A tensor or PIL image as a (C, H, W) or (C, D, H, W) tensor, integer or floating-point.  ValueError: it is no image.

    name: for the error.
    """
    if isinstance(image, Image.Image):
        try:
            return tensor_of(image)
        except OSError as error:  # PIL reads files lazily, and this one is cut short
            raise BadImageError(f"cannot read the image {name} ({error})") from None
    if not isinstance(image, Tensor):
        raise ValueError(f"{name} has a {_type(image)} for an image; a tensor (C, H, W) or a PIL image is wanted")
    if image.ndim not in (3, 4) or not image.numel():
        raise ValueError(
            f"{name} has an image of shape {tuple(image.shape)}; (C, H, W) is wanted, as (1, 28, 28) for a grey one, or "
            "(C, D, H, W) of a volume"
        )
    if image.dtype not in INTEGERS and not image.is_floating_point():
        raise ValueError(
            f"{name} has an image of {image.dtype}; uint8 from 0 to 255, uint16, int16, or floating-point numbers, are wanted"
        )
    if image.device.type != "cpu":
        raise ValueError(f"{name} has an image on {image.device}; give images on the CPU, the run brings them to its devices")
    return image.detach().as_subclass(Tensor)


def _opened(samples: Any, split: str) -> MapStyle:
    """A split, with the properties of its first sample."""
    _check_map_style(samples, split)
    name = f"{split}[0]"
    with all_seeded(0):
        image, target = _sample(samples, 0, name)
    shown = limits_of(image.dtype)
    if image.is_floating_point():
        least, most = image.min().item(), image.max().item()
        shown = (0.0, 1.0) if least >= 0 and most <= 1 else (-max(abs(least), abs(most)), max(abs(least), abs(most)))
    dims = image.ndim - 1
    return MapStyle(samples, split, image.dtype, len(image), kind_of(target, dims), shown, dims)


def _check_map_style(samples: Any, split: str) -> None:
    what = f"the dataset to {'train on' if split == 'train' else 'evaluate'}"
    if isinstance(samples, DataLoader):
        raise ValueError(f"{what} is a DataLoader; give its dataset (loader.dataset), the run shares samples out by itself")
    if isinstance(samples, IterableDataset):
        raise ValueError(
            f"{what} is a {_type(samples)}, which has no numbered samples: it gives them in one order, once per process, and "
            "a run reads each by its number, in an order that any number of ranks share; where they fit in memory pass "
            "list(dataset), else give it __getitem__ and __len__"
        )
    if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
        raise ValueError(
            f"{what} is a {_type(samples)}, which has no numbered samples; give a map-style dataset, with __getitem__ and "
            "__len__"
        )
    if len(samples) == 0:
        raise ValueError(f"{what}, a {_type(samples)}, has 0 samples; give one with at least 1")


def _sample(samples: Any, index: int, name: str) -> tuple[Tensor, int | Tensor]:
    try:
        sample = samples[index]
    except OSError as error:
        raise BadImageError(f"cannot read the image {name} ({error})") from None
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        got = f"{_type(sample)} of {len(sample)}" if isinstance(sample, tuple | list) else _type(sample)
        raise ValueError(f"{name} is a {got}; a pair is wanted: an image and its class number, or another label")
    image = image_of(sample[0], name)
    return image, _labels(sample[1], name, image.shape)


def _labels(target: Any, name: str, shape: Sequence[int]) -> int | Tensor:
    """A target of one of the kinds.  shape: of the image.  ValueError: it is of none."""
    dims = len(shape) - 1
    if isinstance(target, Mapping) and {"boxes", "labels"} <= set(target):
        return _boxes(target, name)
    if isinstance(target, Image.Image):
        target = np.array(target)
    labels = target if isinstance(target, Tensor) else torch.from_numpy(np.array(target)) if _is_numeric(target) else None
    if labels is None or labels.is_complex() or (labels.dtype == torch.bool and labels.ndim in (0, dims)):
        got = target if isinstance(target, bool | str | None) else getattr(target, "dtype", _type(target))
        raise ValueError(f"{name} has the label {got!r}; a class number, or whole numbers for its pixels, are wanted")
    labels = labels.detach().as_subclass(Tensor)
    if labels.is_floating_point() and labels.ndim < 2:
        return labels.reshape(-1).to(torch.float32)
    if labels.is_floating_point() or labels.ndim not in (0, 1, dims, dims + 1):
        axes = "D, H, W" if dims == 3 else "H, W"
        raise ValueError(
            f"{name} has labels of shape {tuple(labels.shape)} and {labels.dtype} and an image of shape {tuple(shape)}; wanted "
            f"are a class number, ({axes}) or (K, {axes}) integers for pixels, (K,) integers for several classes, or (K,) "
            "floating-point values"
        )
    if labels.ndim == 0:
        return int(labels)
    if labels.ndim == dims:
        return labels if labels.dtype == torch.uint8 else labels.long()
    if labels.numel() and not ((labels == 0) | (labels == 1)).all():
        hint = "; of a volume give the image as (1, D, H, W)" if tuple(labels.shape) == tuple(shape) else ""
        raise ValueError(
            f"{name} has {int(labels.long().max())} among labels of shape {tuple(labels.shape)}; 0 and 1 are wanted{hint}"
        )
    return labels.to(torch.uint8)


def _boxes(target: Mapping[str, Any], name: str) -> Tensor:
    """(N, 7) of a target as torchvision's detectors have it: boxes, labels, and iscrowd and area where they are there."""
    try:
        return rows_of(target["boxes"], target["labels"], crowd=target.get("iscrowd"), area=target.get("area"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} has boxes that are none ({error}); boxes (N, 4) and labels (N,) are wanted") from None


def _is_numeric(target: Any) -> bool:
    return isinstance(target, int | float | np.ndarray | np.generic) and np.asarray(target).dtype.kind in "iufb"


def _class_names(train: Any, evaluate: Any, given: Sequence[str] | int | None) -> list[str]:
    names, others = given if given is not None else getattr(train, "classes", None), getattr(evaluate, "classes", None)
    if isinstance(names, int) and not isinstance(names, bool) and names > 0:
        return [str(number) for number in range(names)]
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ValueError(
            f"the classes are {'not known' if names is None else repr(names)}: give names or their number, as "
            "classes=['cat', 'dog'] or classes=10, or the dataset to train on an attribute `classes` of names"
        )
    if given is None and others is not None and list(others) != list(names):
        raise ValueError(
            f"the dataset to train on has {len(names)} classes and the one to evaluate {len(others)}, or in another order; "
            "class numbers must mean the same in both, so give them with classes=[...]"
        )
    return [name if isinstance(name, str) else ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
            for name in names]  # fmt: skip


def _described(split: MapStyle) -> str:
    labels = {"class": "images", "pixels": "pixels"}.get(split.labels, f"the kind '{split.labels}'")
    what = "images" if split.dims == 2 else "volumes"
    return f"{in_words(split.dtype)} {what} of {split.channels} channels with labels of {labels}"


def _type(thing: Any) -> str:
    return type(thing).__name__
