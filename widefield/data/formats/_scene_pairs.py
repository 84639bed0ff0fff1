"""Maps of a scene's classes with the scene as a picture for the target, as aerial photographs are made of maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.data import Dataset, WindowedImages
from widefield.geometry import Interval
from widefield.geometry.box import full_box
from widefield.geometry.interval import pieces_of

COLOURS = torch.tensor([[46, 110, 180], [40, 120, 60], [220, 205, 120], [200, 90, 80]], dtype=torch.uint8)
"""By class, as a map has them: water, forest, field, built-up land; where there is no label, black."""
BRIGHTEST = 2048
"""The reflectance, in units of 1/10,000, that is white in a picture."""
BAND = 256
"""Rows made at a time."""
_RED_GREEN_BLUE = [2, 1, 0]


@dataclass(frozen=True)
class ScenePairs:
    """A split of scenes, each as a map and a picture."""

    scenes: WindowedImages

    def __len__(self) -> int:
        return len(self.scenes)

    def name_of(self, index: int) -> str:
        return self.scenes.name_of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        return (3, *self.scenes.shape(index)[1:])

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read_window(index, full_box(self.shape(index)[1:]))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        rows, columns = window
        colours = torch.cat([COLOURS, COLOURS.new_zeros(256 - len(COLOURS), 3)])
        painted, picture = (torch.empty(3, len(rows), len(columns), dtype=torch.uint8) for _ in range(2))
        for band in pieces_of(rows, BAND):  # temporary memory is that of some rows
            bands, label = self.scenes.read_window(index, (band, columns))
            part = slice(band.start - rows.start, band.stop - rows.start)
            painted[:, part] = colours[label.int()].permute(2, 0, 1)
            shades = bands[_RED_GREEN_BLUE].to(torch.int32).mul(255).div(BRIGHTEST, rounding_mode="floor")
            picture[:, part] = shades.clamp(max=255).to(torch.uint8)
        return painted, picture


def paired(train: WindowedImages, evaluate: WindowedImages) -> Dataset:
    """Three colours in and out."""
    about = {"in_memory": False, "labels": "image"}
    return Dataset(ScenePairs(train), ScenePairs(evaluate), ["red", "green", "blue"], 3, MEAN, STD, **about)


MEAN, STD = [0.5, 0.5, 0.4], [0.3, 0.2, 0.15]
"""Of the maps, about."""
