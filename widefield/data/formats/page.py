"""Synthetic pages of any size with scikit-learn's digits, for segmentation: class 0 is background, 1..10 are the digits 0..9.

With `pairs`, for restoration: degraded pages with clean ones as targets, see _page_pairs.py.  With `boxes`, for detection: the
box of each digit, see _page_boxes.py.

A page is a grid of square cells.  A cell has one digit or none: a scan of 8x8 pixels, enlarged bilinearly, with random size,
place and contrast within its cell, so digits never overlap; at the page's edge they may be cut off.  The background has a
coarse and a fine grain.  A pixel has the class of its digit where the enlarged ink is above a threshold.

Every random number is a hash of the page, the cell or pixel and its purpose.  So a page is a function of (seed, split, index);
a window of it equals that part of the whole page bit for bit, and its cost is proportional to its own pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.formats import digits
from widefield.data.formats._page_boxes import BoxedPages
from widefield.data.formats._page_pairs import Degradation, paired
from widefield.data.place_hashes import place_hashes
from widefield.data.transforms import seed_of
from widefield.geometry.interval import Interval, pieces_of

INK = 96
"""The threshold, of 255: pixels of an enlarged scan above it have the digit's class."""
BAND = 256
"""Rows rendered at a time, so that temporary memory is small."""
GRAIN = 32
"""Pixels between the points of the background's coarse grain."""
Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PageLayout:
    """Pixels of a page, smallest and largest side of a digit, and the probability that a cell has one."""

    size: tuple[int, int]
    digit_px: tuple[int, int]
    chance: float

    @property
    def cell(self) -> int:
        """The side of a cell: that of the largest digit."""
        return self.digit_px[1]


@dataclass(frozen=True)
class PlacedDigit:
    """A scan, by its number, with the square of the page that it is enlarged to, and its contrast from 0 to 1."""

    scan: int
    box: tuple[Interval, Interval]
    contrast: float


@dataclass(frozen=True)
class Pages:
    """One split: `count` pages of the scans (N, 8, 8) uint8 with `labels` (N,)."""

    split: str
    count: int
    seed: int
    layout: PageLayout
    scans: Pixels
    labels: Pixels

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        return f"page/{self.split}/{index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (1, *self.layout.size)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        height, width = self.layout.size
        return self.read_window(index, (Interval(0, height), Interval(0, width)))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        rows, columns = window
        key = seed_of(self.seed, "page", self.split, index)
        image = np.empty((len(rows), len(columns)), dtype=np.uint8)
        label = np.zeros_like(image)
        for band in pieces_of(rows, BAND):
            part = slice(band.start - rows.start, band.stop - rows.start)
            image[part] = _paper(key, band, columns)
            self._draw(key, band, columns, image[part], label[part])
        return torch.from_numpy(image).unsqueeze(0), torch.from_numpy(label)

    def _draw(self, key: int, rows: Interval, columns: Interval, image: Pixels, label: Pixels) -> None:
        """Draw the digits of all cells that overlap the window."""
        for digit in self._placed(key, rows, columns):
            ink = _enlarged(self.scans[digit.scan], digit.box, (rows, columns))
            if ink.size:
                where = tuple(slice(part.start, part.stop) for part in _within(digit.box, (rows, columns)))
                _print(image[where], ink, 0.4 + 0.6 * digit.contrast)
                label[where][ink > INK] = 1 + self.labels[digit.scan]

    def inked(self, index: int) -> Iterator[tuple[int, tuple[Interval, ...]]]:
        """The digits of a page, each with the smallest box of rows and columns that has its pixels."""
        page = tuple(Interval(0, extent) for extent in self.layout.size)
        for digit in self._placed(seed_of(self.seed, "page", self.split, index), *page):
            has_ink = _enlarged(self.scans[digit.scan], digit.box, (page[0], page[1])) > INK
            if has_ink.any():
                start = [(side & run).start for side, run in zip(digit.box, page, strict=True)]
                spans = [np.flatnonzero(has_ink.any(1 - dim)) for dim in (0, 1)]
                runs = [Interval(at + int(one[0]), at + int(one[-1]) + 1) for at, one in zip(start, spans, strict=True)]
                yield int(self.labels[digit.scan]), tuple(runs)

    def _placed(self, key: int, rows: Interval, columns: Interval) -> Iterator[PlacedDigit]:
        """The digits of all cells that overlap the window."""
        cell = self.layout.cell
        across, down = (np.arange(run.start // cell, -(-run.stop // cell)) for run in (columns, rows))
        cells = np.stack(np.meshgrid(down, across, indexing="ij"), axis=-1).reshape(-1, 2)
        numbers = [_chance(key, cells[:, 0], cells[:, 1], purpose) for purpose in range(6)]
        for (y, x), (there, scan, side, top, left, contrast) in zip(cells.tolist(), zip(*numbers, strict=True), strict=True):
            if there >= self.layout.chance:
                continue
            number = int(scan * len(self.scans))
            low, high = self.layout.digit_px
            side_px = low + int(side * (high - low + 1))
            top_px, left_px = (at * cell + int(share * (cell - side_px + 1)) for at, share in ((y, top), (x, left)))
            box = (Interval(top_px, top_px + side_px), Interval(left_px, left_px + side_px))
            yield PlacedDigit(number, box, contrast)


def _within(box: tuple[Interval, Interval], window: tuple[Interval, Interval]) -> list[Interval]:
    """The part of the box in the window, relative to the window's start."""
    shown = [side & run for side, run in zip(box, window, strict=True)]
    return [Interval(one.start - run.start, one.stop - run.start) for one, run in zip(shown, window, strict=True)]


def _enlarged(scan: Pixels, box: tuple[Interval, Interval], window: tuple[Interval, Interval]) -> Pixels:
    """The part in the window of the scan enlarged bilinearly to the box, as torch's interpolate does.

    Elementwise in float32, so that the bits of a pixel do not depend on the window.
    """
    (above, below, down), (left, right, across) = (_neighbours(side, side & run) for side, run in zip(box, window, strict=True))
    ink = scan.astype(np.float32)
    upper = ink[above][:, left] * (1 - across) + ink[above][:, right] * across
    lower = ink[below][:, left] * (1 - across) + ink[below][:, right] * across
    return upper * (1 - down)[:, None] + lower * down[:, None]


def _neighbours(side: Interval, shown: Interval) -> tuple[Pixels, Pixels, Pixels]:
    """For each shown pixel of an enlarged side: the scan's pixels before and after its center, and the latter's weight."""
    at = (np.arange(shown.start, shown.stop) - side.start + 0.5) * (8 / len(side)) - 0.5
    at = np.clip(at, 0, 7)
    before = at.astype(np.int64)
    return before, np.minimum(before + 1, 7), (at - before).astype(np.float32)


def _print(paper: Pixels, ink: Pixels, contrast: float) -> None:
    """Blend the paper towards white by ink times contrast."""
    share = ink * np.float32(contrast / 255)
    paper += ((255 - paper) * share).astype(np.uint8)


def _paper(key: int, rows: Interval, columns: Interval) -> Pixels:
    """A dark background between 16 and 111 of 255: a coarse grain, bilinear between points, and a fine one of single pixels.

    In integers, so that the bits of a pixel do not depend on the window.
    """
    down, across = (np.arange(run.start // GRAIN, run.stop // GRAIN + 2) for run in (rows, columns))
    points = (place_hashes(key, down[:, None], across[None, :], purpose=7) >> np.uint32(26)).astype(np.int32)  # 0..63
    (y, dy), (x, dx) = (_between(run) for run in (rows, columns))
    lines = points[:, x] * (GRAIN - dx) + points[:, x + 1] * dx
    coarse = (lines[y] * (GRAIN - dy)[:, None] + lines[y + 1] * dy[:, None]) // GRAIN**2
    at = [np.arange(run.start, run.stop) for run in (rows, columns)]
    fine = place_hashes(key, at[0][:, None], at[1][None, :], purpose=8) >> np.uint32(27)  # 0..31
    return (16 + coarse + fine).astype(np.uint8)


def _between(run: Interval) -> tuple[Pixels, Pixels]:
    """For each pixel: the index of the grain's point before it, counted from the first one, and its distance from it."""
    pixels = np.arange(run.start, run.stop, dtype=np.int32)
    return pixels // GRAIN - run.start // GRAIN, pixels % GRAIN


def _chance(key: int, y: Pixels, x: Pixels, purpose: int) -> Pixels:
    """Uniform numbers in [0, 1)."""
    return place_hashes(key, y, x, purpose=purpose) / 2.0**32


def open_dataset(
    config: DataConfig,
    *,
    size: tuple[int, int] = (256, 256),
    pages: tuple[int, int] = (64, 8),
    digit_px: tuple[int, int] = (16, 40),
    digits_per_megapixel: float = 400,
    seed: int = 0,
    pairs: bool = False,
    boxes: bool = False,
    noise: float = 0.1,
    scale: int = 1,
) -> Dataset:
    """Pages to train on and to evaluate, with the scans of the training and evaluation split of the format `digits`.

    size: height and width of a page.  pages: how many to train on and to evaluate.  digit_px: smallest and largest side of
    a digit; the largest is a cell's side.  digits_per_megapixel: the average number of digits per million pixels.
    seed: of the pages, independent of the run's, so that runs with different seeds have the same pages.
    pairs: the target is the page itself, for restoration, and the input a degraded one: the mean of each scale x scale pixels,
    and noise of that standard deviation, as a share of 255.  boxes: the targets are boxes of digits, for detection.
    ValueError: options out of range, or both pairs and boxes; data.path or data.hold_out is set.
    """
    if config.path is not None or config.hold_out is not None:
        raise ValueError("data.name=page is built in; leave data.path and data.hold_out out")
    _check(size=size, pages=pages, digit_px=digit_px)
    layout = _layout_of(size, digit_px, digits_per_megapixel)
    scans = digits.open_dataset(DataConfig(name="digits"))
    train, evaluate = (
        Pages(split, count, seed, layout, part.images.squeeze(1).numpy(), np.array(part.labels))  # type: ignore[attr-defined]
        for split, count, part in zip(("train", "evaluate"), pages, (scans.train, scans.evaluate), strict=True)
    )
    if boxes:
        return _boxed(train, evaluate, scans.classes, pairs=pairs)
    if pairs:
        return paired(train, evaluate, Degradation(noise, scale), layout.size)
    names = ["background", *scans.classes]
    # mean and standard deviation of the pixels of the 64 training pages that the defaults make
    return Dataset(train, evaluate, names, 1, [0.298], [0.14], in_memory=False, labels="pixels")


def _boxed(train: Pages, evaluate: Pages, classes: list[str], *, pairs: bool) -> Dataset:
    """ValueError: `pairs` are asked for too."""
    if pairs:
        raise ValueError("data.options has pairs and boxes, which are targets of two kinds; leave one of them out")
    splits = BoxedPages(train), BoxedPages(evaluate)
    return Dataset(*splits, classes, 1, [0.298], [0.14], in_memory=False, labels="boxes")


def _layout_of(size: tuple[int, int], digit_px: tuple[int, int], digits_per_megapixel: float) -> PageLayout:
    """ValueError: more digits than there are cells, or none."""
    chance = digits_per_megapixel * digit_px[1] ** 2 / 1e6
    if not 0 < chance <= 1:
        raise ValueError(
            f"data.options.digits_per_megapixel is {digits_per_megapixel:g}; digits of up to {digit_px[1]} px want a number "
            f"above 0 and up to {1e6 / digit_px[1] ** 2:.0f}, so that they do not overlap"
        )
    return PageLayout((size[0], size[1]), (digit_px[0], digit_px[1]), chance)


def _check(**options: tuple[int, int]) -> None:
    for name, pair in options.items():
        whole = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(one) is int and one > 0 for one in pair)
        if not whole:
            raise ValueError(f"data.options.{name} is {pair!r}; two whole numbers above 0 are wanted, as [256, 256]")
    low, high = options["digit_px"]
    if low > high:
        raise ValueError(f"data.options.digit_px is [{low}, {high}]; the smallest side comes first")


CASES = [
    ({"options": {"size": [320, 400], "pages": [3, 2]}}, 3, 2, 11),
    ({"options": {"size": [64, 96], "pages": [3, 2], "pairs": True, "scale": 2}}, 3, 2, 1),
    (
        {"options": {"size": [160, 200], "pages": [3, 2], "digit_px": [12, 20], "digits_per_megapixel": 2000, "boxes": True}},
        3,
        2,
        10,
    ),
]
"""As in digits.py."""
