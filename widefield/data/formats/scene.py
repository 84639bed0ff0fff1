"""Synthetic satellite scenes of any size, four bands of 16 bits, for segmentation: water, forest, field and built-up land.

The land is two smooth noises, height and moisture: low land is water, of the rest the moist is forest and the dry is field; a
block of buildings stands on a part of the cells of a coarse grid that are dry land.  A pixel's bands are its class's
reflectance, the light of the place, and grain.  As in a real scene the scanned strip lies aslant: outside of it all bands are
0, which is nodata, and these pixels' label is 255.

Every number is a hash of the scene and the place, so a window is that part of the whole bit for bit, and costs its own pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.formats._scene_pairs import paired
from widefield.data.place_hashes import place_hashes, smooth_noise
from widefield.data.transforms import seed_of
from widefield.geometry.interval import Interval, pieces_of

CLASSES = ["water", "forest", "field", "built"]
REFLECTANCE = np.array([[700, 620, 420, 230], [420, 640, 380, 3000], [900, 1250, 1400, 2600], [1500, 1650, 1800, 2250]])
"""By class: blue, green, red and near infrared, in units of 1/10,000, as Sentinel-2's files have them."""
NODATA, NO_LABEL = 0, 255
BAND = 256
"""Rows made at a time, so that temporary memory is small."""
Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Land:
    """size: of a scene, in pixels.  feature_px: the distance of the points of the smooth noises.  slant: how much of the width
    the strip moves from the first row to the last."""

    size: tuple[int, int]
    feature_px: int
    slant: float


@dataclass(frozen=True)
class Scenes:
    """One split: `count` scenes."""

    split: str
    count: int
    seed: int
    land: Land

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        return f"scene/{self.split}/{index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (4, *self.land.size)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        height, width = self.land.size
        return self.read_window(index, (Interval(0, height), Interval(0, width)))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        rows, columns = window
        key = seed_of(self.seed, "scene", self.split, index)
        image = np.empty((4, len(rows), len(columns)), dtype=np.uint16)
        label = np.empty((len(rows), len(columns)), dtype=np.uint8)
        for band in pieces_of(rows, BAND):
            part = slice(band.start - rows.start, band.stop - rows.start)
            image[:, part], label[part] = _made(key, self.land, band, columns)
        return torch.from_numpy(image), torch.from_numpy(label)


def _made(key: int, land: Land, rows: Interval, columns: Interval) -> tuple[Pixels, Pixels]:
    """Bands (4, H, W) and labels (H, W) of a window, in integers, so that the bits of a pixel do not depend on the window."""
    if not len(rows) or not len(columns):
        return np.empty((4, len(rows), len(columns)), np.uint16), np.empty((len(rows), len(columns)), np.uint8)
    far, near = land.feature_px, max(4, land.feature_px // 4)
    height = 3 * smooth_noise(key, 0, far, rows, columns) + smooth_noise(key, 1, near, rows, columns)
    moisture = 3 * smooth_noise(key, 2, far, rows, columns) + smooth_noise(key, 3, near, rows, columns)
    y, x = (np.arange(run.start, run.stop) for run in (rows, columns))
    block = max(4, land.feature_px // 3)
    houses = place_hashes(key, (y // block)[:, None], (x // block)[None], purpose=4) % np.uint32(5) == 0
    label = np.where(moisture > 530, 1, 2).astype(np.uint8)
    label[houses & (moisture <= 530)] = 3
    label[height < 440] = 0
    grain = (place_hashes(key, y[:, None], x[None], purpose=5) >> np.uint32(24)).astype(np.int64) - 128
    light = 230 + smooth_noise(key, 6, 4 * far, rows, columns) // 4
    bands = REFLECTANCE[label].transpose(2, 0, 1) * light // 256 + grain * (1 + label) // 2
    outside = _outside(land, y, x)
    bands[:, outside], label[outside] = NODATA, NO_LABEL
    bands[:, ~outside] = np.clip(bands[:, ~outside], 1, 10_000)
    return bands.astype(np.uint16), label


def _outside(land: Land, y: Pixels, x: Pixels) -> Pixels:
    """Left and right of the strip, which moves by `slant` of the width over the height."""
    height, width = land.size
    moved = int(land.slant * width)
    first = moved - moved * y // max(1, height - 1)
    return (x[None] < first[:, None]) | (x[None] >= width - moved + first[:, None])


def open_dataset(
    config: DataConfig,
    *,
    size: tuple[int, int] = (512, 512),
    scenes: tuple[int, int] = (16, 4),
    feature_px: int = 48,
    slant: float = 0.1,
    seed: int = 0,
    pairs: bool = False,
) -> Dataset:
    """Scenes to train on and to evaluate.

    size: height and width of a scene.  scenes: how many to train on and to evaluate.  feature_px: the size of lakes and woods.
    slant: of the width, 0 to 0.4, how far the scanned strip moves from the first row to the last; 0: no pixel is nodata.
    seed: of the scenes, independent of the run's.
    pairs: the input is a map of the classes in their colours and the target the scene as a picture, red, green and blue of 8
        bits each, for image to image.
    ValueError: options out of range; data.path or data.hold_out is set.
    """
    if config.path is not None or config.hold_out is not None:
        raise ValueError("data.name=scene is built in; leave data.path and data.hold_out out")
    for name, pair in (("size", size), ("scenes", scenes)):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(type(one) is int and one > 0 for one in pair)):
            raise ValueError(f"data.options.{name} is {pair!r}; two whole numbers above 0 are wanted, as [512, 512]")
    if type(feature_px) is not int or feature_px < 8:
        raise ValueError(f"data.options.feature_px is {feature_px!r}; a whole number of 8 or more is wanted")
    if not 0 <= slant <= 0.4:
        raise ValueError(f"data.options.slant is {slant!r}; a number from 0 to 0.4 is wanted")
    if not isinstance(pairs, bool):
        raise ValueError(f"data.options.pairs is {pairs!r}; true or false is wanted")
    land = Land((size[0], size[1]), feature_px, float(slant))
    train, evaluate = (Scenes(split, count, seed, land) for split, count in zip(("train", "evaluate"), scenes, strict=True))
    if pairs:
        return paired(train, evaluate)
    # of the pixels of the 16 training scenes that the defaults make, as shares of 65,535
    return Dataset(
        train, evaluate, list(CLASSES), 4, MEAN, STD, in_memory=False, labels="pixels", dtype=torch.uint16,
    )  # fmt: skip


MEAN, STD = [0.0103, 0.0124, 0.0111, 0.0261], [0.0055, 0.0067, 0.0087, 0.0200]
CASES = [
    ({"options": {"size": [120, 140], "scenes": [3, 2]}}, 3, 2, 4),
    ({"options": {"size": [120, 140], "scenes": [3, 2], "pairs": True}}, 3, 2, 3),
]
"""As in digits.py."""
