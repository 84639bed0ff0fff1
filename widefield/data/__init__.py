"""Samples, their order and their batches.  A dataset format is a file in formats/; order depends on seed and position alone.

A user's own comes as `package.module:callable` in a recipe, or as map-style datasets of a Python program (map_style.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from widefield.config import DataConfig
from widefield.geometry import Interval
from widefield.naming import load
from widefield.own_code import call, code_named, is_code, refuse_object


class BadImageError(ValueError):
    """An image that cannot be read; the text names it and says why."""


class Images(Protocol):
    """One split of a dataset: numbered images with a class number each, or one for every pixel."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Image (C, H, W) uint8 and its class number, or its pixels' as (H, W) uint8 or int64.  It draws nothing at random.

        BadImageError names an image that cannot be read.
        """

    def name_of(self, index: int) -> str:
        """What a user calls the image: its path."""


@runtime_checkable
class WindowedImages(Images, Protocol):
    """Images of which a part can be read without reading the rest."""

    def shape(self, index: int) -> tuple[int, ...]:
        """(C, H, W) of the whole image."""

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        """Bit for bit what `read` gives within `window`: an interval of rows and one of columns."""


@dataclass(frozen=True)
class Dataset:
    """What a format offers.  `mean` and `std` are per channel, of pixels scaled to 0..1."""

    train: Images
    evaluate: Images
    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    in_memory: bool
    """Whether reading is a copy from memory, so that worker processes would only cost."""
    pixels: bool = False
    """Whether every pixel has a class number, in place of every image."""
    floating: bool = False
    """Whether images are floating-point numbers, as a user's own dataset gives them, in place of uint8."""


def open_dataset(config: DataConfig) -> Dataset:
    """The dataset a config names.

    A user's own callable is given the config and its options too, and gives a Dataset, or two map-style datasets: to train on
    and to evaluate.
    ValueError: there is no such format or folder, an image class is empty, the format does not take the options, or what a
    user's own gives is no dataset.
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


def checked(made: Any, name: str) -> Dataset:
    """What a user's callable gave, as a Dataset; ValueError where it is none."""
    if isinstance(made, tuple | list) and len(made) == 2:
        return load(__name__, "map_style").dataset_of(*made)  # by name, as formats are: such files import this one
    if not isinstance(made, Dataset):
        raise ValueError(
            f"data.name={name} gives a {type(made).__name__}; a widefield.data.Dataset is wanted, or two map-style datasets, "
            "to train on and to evaluate"
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
