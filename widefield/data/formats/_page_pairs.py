"""Degraded pages with the clean ones as targets: fewer pixels, and noise.

A pixel's noise is a sum of eight hashed bytes, which is nearly normal, in integers; so a window is that part of the whole bit
for bit, as of the pages themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.data import Dataset, WindowedImages
from widefield.data.place_hashes import place_hashes
from widefield.data.transforms import seed_of
from widefield.geometry import Interval
from widefield.geometry.box import enlarged, full_box

Pixels = np.ndarray[Any, Any]
_BYTES = 8
_SPREAD = (_BYTES * (256**2 - 1) / 12) ** 0.5
"""The standard deviation of a sum of eight bytes."""


@dataclass(frozen=True)
class Degradation:
    """noise: its standard deviation, as a share of 255.  scale: of how many pixels along each dim the mean is taken."""

    noise: float
    scale: int

    def __post_init__(self) -> None:
        """ValueError: options out of range."""
        if not 0 <= self.noise <= 1:
            raise ValueError(f"data.options.noise is {self.noise}; a share of the range from 0 to 1 is wanted, as 0.1")
        if type(self.scale) is not int or self.scale < 1:
            raise ValueError(f"data.options.scale is {self.scale!r}; a whole number of 1 or more is wanted, as 2")

    def __call__(self, clean_HW: Pixels, key: int, box: tuple[Interval, ...]) -> Pixels:
        """The degraded pixels of `box`.  clean_HW: uint8, scale times as many along each dim.  key: of the page."""
        scale, (height, width) = self.scale, (len(run) for run in box)
        blocks = clean_HW.reshape(height, scale, width, scale).sum((1, 3), dtype=np.int64)
        rows, columns = (np.arange(run.start, run.stop) for run in box)
        total = np.zeros((height, width), dtype=np.int64)
        for purpose in (9, 10):
            hashes = place_hashes(key, rows[:, None], columns[None], purpose=purpose)
            for shift in (0, 8, 16, 24):
                total += (hashes >> np.uint32(shift)) & np.uint32(255)
        noise = (total - _BYTES * 255 / 2) * (self.noise * 255 / _SPREAD)
        return np.clip(np.floor(blocks / scale**2 + noise + 0.5), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class PagePairs:
    """A split of pages, each as an input and its target."""

    pages: WindowedImages
    degrade: Degradation
    key: str
    """Of the split's noise."""

    def __len__(self) -> int:
        return len(self.pages)

    def name_of(self, index: int) -> str:
        return self.pages.name_of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        channels, *size = self.pages.shape(index)
        return (channels, *(extent // self.degrade.scale for extent in size))

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read_window(index, full_box(self.shape(index)[1:]))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        clean, _ = self.pages.read_window(index, enlarged(window, self.degrade.scale))
        made = self.degrade(clean[0].numpy(), seed_of(self.key, index), window)
        return torch.from_numpy(made).unsqueeze(0), clean


def paired(train: Any, evaluate: Any, degrade: Degradation, size: tuple[int, int]) -> Dataset:
    """Degraded pages with their targets.  ValueError: the pages' sides are no multiples of the scale."""
    if any(extent % degrade.scale for extent in size):
        raise ValueError(
            f"data.options.size is {list(size)}, of the targets, and a pixel of the input is {degrade.scale} of theirs along "
            f"each dim; take multiples of scale={degrade.scale}"
        )
    splits = [PagePairs(pages, degrade, f"noise/{pages.split}/{pages.seed}") for pages in (train, evaluate)]
    about = {"in_memory": False, "labels": "image", "scale": degrade.scale}
    return Dataset(splits[0], splits[1], ["grey"], 1, [0.298], [0.14], **about)
