"""Samples, their order and their batches.  A dataset format is a file in formats/; order depends on seed and position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from widefield.config import DataConfig
from widefield.naming import load


class BadImageError(ValueError):
    """An image that cannot be read; the text names it and says why."""


class Images(Protocol):
    """One split of a dataset: numbered images with class numbers."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, int]:
        """Image (C, H, W) uint8 and its class number.  BadImageError names an image that cannot be read."""

    def name_of(self, index: int) -> str:
        """What a user calls the image: its path."""


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


def open_dataset(config: DataConfig) -> Dataset:
    """The dataset a config names; ValueError where the format or its folder does not exist or an image class is empty."""
    return load("widefield.data.formats", config.name).open_dataset(config)
