"""Samples, their order and their batches.  A dataset format is a file in formats/; order depends on seed and position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from widefield.config import DataConfig
from widefield.geometry import Interval
from widefield.naming import load


class BadImageError(ValueError):
    """An image that cannot be read; the text names it and says why."""


class Images(Protocol):
    """One split of a dataset: numbered images with a class number each, or one for every pixel."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Image (C, H, W) uint8 and its class number, or its pixels' as (H, W) uint8 or int64.

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


def open_dataset(config: DataConfig) -> Dataset:
    """The dataset a config names.

    ValueError: there is no such format or folder, an image class is empty, or the format does not take the options.
    """
    module = load("widefield.data.formats", config.name)
    try:
        return module.open_dataset(config, **config.options)
    except TypeError as error:
        raise ValueError(f"data.options {config.options} do not fit '{config.name}': {error}") from None
