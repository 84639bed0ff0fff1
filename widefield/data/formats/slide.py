"""Synthetic slides of tissue of any size, in colour, for classification: is there a tumour somewhere, or not?

A slide is glass with islands of tissue in which nuclei lie on the cells of a grid.  In every second slide one round area of the
tissue is a tumour: its nuclei are denser, larger and darker.  It is a small part of the slide, and without the rest nobody
knows the label, so a slide is one sample, of which all pixels count.

Every number is a hash of the slide and the place, so a window is that part of the whole bit for bit, and costs its own pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.place_hashes import place_hashes, smooth_noise
from widefield.data.transforms import seed_of
from widefield.geometry.interval import Interval, pieces_of

CLASSES = ["normal", "tumour"]
GLASS, STROMA, NUCLEUS = (244, 242, 245), (226, 158, 190), (118, 66, 142)
"""Red, green and blue of haematoxylin and eosin."""
CELL = 12
"""Pixels of a side of the grid of nuclei, each in its own cell."""
BAND = 256
"""Rows made at a time, so that temporary memory is small."""
Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Slides:
    """One split: `count` slides, every second of which has a tumour.  tumour_px: its radius."""

    split: str
    count: int
    seed: int
    size: tuple[int, int]
    tumour_px: int

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        return f"slide/{self.split}/{index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (3, *self.size)

    def target_of(self, index: int) -> int:
        return index % 2

    def read(self, index: int) -> tuple[Tensor, int]:
        height, width = self.size
        return self.read_window(index, (Interval(0, height), Interval(0, width)))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int]:
        rows, columns = window
        key = seed_of(self.seed, "slide", self.split, index)
        image = np.empty((3, len(rows), len(columns)), dtype=np.uint8)
        for band in pieces_of(rows, BAND):
            if len(columns):
                image[:, band.start - rows.start : band.stop - rows.start] = self._made(key, index, band, columns)
        return torch.from_numpy(image), self.target_of(index)

    def _made(self, key: int, index: int, rows: Interval, columns: Interval) -> Pixels:
        """(3, H, W) of a window, in integers, so that the bits of a pixel do not depend on the window."""
        y, x = (np.arange(run.start, run.stop) for run in (rows, columns))
        middle = self._tumour(key)
        far = (y[:, None] - middle[0]) ** 2 + (x[None] - middle[1]) ** 2
        is_tumour = far < self.tumour_px**2 if self.target_of(index) else np.zeros(far.shape, dtype=bool)
        land = 3 * smooth_noise(key, 0, 96, rows, columns) + smooth_noise(key, 1, 24, rows, columns)
        is_tissue = (land > 440) | is_tumour
        image = np.where(is_tissue[None], _colour(STROMA), _colour(GLASS))
        nuclei = _nuclei(key, y, x, is_tumour) & is_tissue
        image = np.where(nuclei[None], _colour(NUCLEUS) - 24 * is_tumour, image)
        grain = (place_hashes(key, y[:, None], x[None], purpose=9) >> np.uint32(28)).astype(np.int64) - 8
        return np.clip(image + grain, 0, 255).astype(np.uint8)

    def _tumour(self, key: int) -> tuple[int, int]:
        """Its middle, so far from the edge that all of it is in the slide."""
        place = np.zeros(1, dtype=np.int64)
        spans = [max(1, extent - 2 * self.tumour_px) for extent in self.size]
        found = [int(place_hashes(key, place, place, purpose=20 + axis)[0]) % span for axis, span in enumerate(spans)]
        return found[0] + self.tumour_px, found[1] + self.tumour_px


def _colour(rgb: tuple[int, int, int]) -> Pixels:
    return np.array(rgb, dtype=np.int64)[:, None, None]


def _nuclei(key: int, y: Pixels, x: Pixels, is_tumour: Pixels) -> Pixels:
    """Where a nucleus is: in 2 of 5 cells of the grid, in a tumour in 4 of 5; its middle is drawn within its cell."""
    row, column = (y // CELL)[:, None], (x // CELL)[None]
    here, down, across = (place_hashes(key, row, column, purpose=10 + purpose) for purpose in range(3))
    chance = np.where(is_tumour, 4, 2)
    middle_y = row * CELL + 4 + (down % np.uint32(5)).astype(np.int64)
    middle_x = column * CELL + 4 + (across % np.uint32(5)).astype(np.int64)
    far = (y[:, None] - middle_y) ** 2 + (x[None] - middle_x) ** 2
    return (here % np.uint32(5) < chance) & (far <= np.where(is_tumour, 16, 9))


def open_dataset(
    config: DataConfig,
    *,
    size: tuple[int, int] = (384, 384),
    slides: tuple[int, int] = (64, 32),
    tumour_px: int = 40,
    seed: int = 0,
) -> Dataset:
    """Slides to train on and to evaluate, half of them with a tumour.

    size: height and width of a slide.  slides: how many to train on and to evaluate.  tumour_px: the radius of a tumour.
    seed: of the slides, independent of the run's, so that runs with different seeds have the same slides.
    ValueError: options out of range; data.path or data.hold_out is set.
    """
    if config.path is not None or config.hold_out is not None:
        raise ValueError("data.name=slide is built in; leave data.path and data.hold_out out")
    for name, pair in (("size", size), ("slides", slides)):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(type(one) is int and one > 0 for one in pair)):
            raise ValueError(f"data.options.{name} is {pair!r}; two whole numbers above 0 are wanted, as [384, 384]")
    if type(tumour_px) is not int or not 8 <= tumour_px <= min(size) // 2:
        raise ValueError(
            f"data.options.tumour_px is {tumour_px!r}; a whole number from 8 to half of the slide's {min(size)} px is wanted"
        )
    train, evaluate = (
        Slides(split, count, seed, (size[0], size[1]), tumour_px)
        for split, count in zip(("train", "evaluate"), slides, strict=True)
    )
    return Dataset(train, evaluate, list(CLASSES), 3, MEAN, STD, in_memory=False)


MEAN, STD = [0.884, 0.708, 0.805], [0.112, 0.191, 0.120]
"""Of the pixels of the 64 training slides that the defaults make, scaled to 0..1."""
CASES = [({"options": {"size": [120, 140], "slides": [4, 2]}}, 4, 2, 2)]
"""As in digits.py."""
