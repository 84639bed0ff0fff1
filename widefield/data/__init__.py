"""Datasets, the order of their samples, and batches.  A dataset format is a file in formats/.

A user's own data is a `package.module:callable` in a recipe, or map-style datasets of a Python program (map_style.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.config.field_types import Labels as Labels
from widefield.data.intensity import Intensity
from widefield.data.spatial.resampling import Resampling
from widefield.geometry import Interval
from widefield.naming import load
from widefield.own_code import call, code_named, is_code, refuse_object


class BadImageError(ValueError):
    """An image cannot be read; the text names it and says why."""


class Images(Protocol):
    """One split of a dataset: numbered images, each with a target of the dataset's kind, see `Labels`.

    It may have `target_of(index)`, the target without reading the image; `weight_of(index) -> float`, how often a sample is
    drawn; `group_of(index)`, what it belongs to, as a patient; `spacing_of(index)`, the lengths of a voxel along each dim, in
    mm (BadImageError: it has a spacing in no unit of length).  They are used where they are there.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Image (C, H, W), or volume (C, D, H, W), as the file has it, and its target.  Not random.

        Pixels are uint8, uint16, int16 or floating-point.

        BadImageError: the image cannot be read.
        """

    def name_of(self, index: int) -> str:
        """The image's name for messages, as its path."""


@runtime_checkable
class WindowedImages(Images, Protocol):
    """Images of which a window can be read without reading the rest."""

    def shape(self, index: int) -> tuple[int, ...]:
        """(C, H, W) of the whole image, (C, D, H, W) of a volume."""

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        """Exactly the part of what `read` returns that is in `window`: an interval per dim, as of rows and of columns."""


@dataclass(frozen=True)
class Dataset:
    """The two splits, and what they have in common.  mean, std: per channel, of pixels scaled as `intensity` says."""

    train: Images
    evaluate: Images
    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    in_memory: bool
    """Whether reading copies from memory, so that worker processes gain nothing."""
    labels: Labels = "class"
    """What the targets are.  `classes` are the names of the classes, of the values, or of an image's channels."""
    dtype: torch.dtype = torch.uint8
    """Of the images; those of floating-point pixels may have any floating dtype."""
    intensity: Intensity = Intensity()
    about: str | None = None
    """What was found, on one line, for the log."""
    dims: int = 2
    """Along how many dims images have pixels: 2, or 3 of volumes."""
    resampling: Resampling | None = None
    """The grid that images were brought to, and that predicted ones are."""
    channel_files: int = 0
    """Of how many files an image is, CASE_0000 and so on, one per channel; 0: of one, of any name."""
    scale: int = 1
    """Of targets that are images: how many of their pixels an image's pixel is, along each dim."""
    class_ids: tuple[int, ...] | None = None
    """What the data set itself numbers its classes by, as COCO's categories from 1 to 90; None: 0, 1, ..."""

    @property
    def pixels(self) -> bool:
        """Whether every pixel has a label, or a value of another image, and not every image."""
        return self.labels in ("pixels", "layers", "image")

    @property
    def image_scale(self) -> int | None:
        """`scale` where targets are images, else None."""
        return self.scale if self.labels == "image" else None

    @property
    def moves_as_one(self) -> bool:
        """Whether transforms are those of pixel_transforms.py: pixels or objects have labels, or torchvision's lack the
        dtype or a dim."""
        return self.pixels or self.labels == "boxes" or self.dtype != torch.uint8 or self.dims != 2

    @property
    def floating(self) -> bool:
        """Whether images are floating-point tensors."""
        return self.dtype.is_floating_point


def open_dataset(config: DataConfig) -> Dataset:
    """The dataset that a config names.

    A user's own callable gets the config and data.options, and returns a Dataset, or a pair of map-style datasets, to train on
    and to evaluate.
    ValueError: no such format or folder, an empty class, options that the format does not take, or the callable returns no
    dataset.
    """
    refuse_object(config.name, key="data.name", keyword="data")
    if is_code(config.name):
        make = code_named(config.name, key="data.name")
        return checked(call(make, config, options=config.options, key="data.options", name=config.name), config.name)
    module = load("widefield.data.formats", config.name)
    try:
        return module.open_dataset(config, **config.options)
    except TypeError as error:
        raise ValueError(f"data.options {config.options} do not fit '{config.name}': {error}") from None


def spacing_of(images: Images, index: int) -> tuple[float, ...] | None:
    """The lengths of a pixel of an image along each dim, in mm; None where the images do not tell.

    BadImageError: the image tells them in no unit of length.
    """
    of = getattr(images, "spacing_of", None)
    found = None if of is None else of(index)
    return None if found is None else tuple(float(length) for length in found)


def spacing_if_told(images: Images, index: int) -> tuple[float, ...] | None:
    """As `spacing_of`; None also where the unit is not known, for what can do without."""
    try:
        return spacing_of(images, index)
    except BadImageError:
        return None


def checked(made: Any, name: str) -> Dataset:
    """What a user's callable returned, as a Dataset.  ValueError: it is none, or has no images, classes or statistics."""
    if isinstance(made, tuple | list) and len(made) == 2:
        return load(__name__, "map_style").dataset_of(*made)  # loaded by name, since map_style.py imports this module
    if not isinstance(made, Dataset):
        raise ValueError(
            f"data.name={name} gives a {type(made).__name__}; a widefield.data.Dataset is wanted, or two map-style datasets, "
            "to train on and to evaluate"
        )
    if made.dims not in (2, 3):
        raise ValueError(
            f"data.name={name} gives images of {made.dims} dims; set dims=2 for images (C, H, W), or 3 for volumes (C, D, H, W)"
        )
    lengths = [len(made.train), len(made.evaluate)]
    if min(lengths) < 1 or not made.classes:
        raise ValueError(
            f"data.name={name} gives {lengths[0]} images to train on, {lengths[1]} to evaluate and {len(made.classes)} "
            "classes; at least 1 of each is wanted"
        )
    for key, values in (("mean", made.mean), ("std", made.std)):
        if len(values) != made.channels:
            raise ValueError(
                f"data.name={name} gives {made.channels} channels and {len(values)} numbers as {key}; one per channel is wanted"
            )
    return made
