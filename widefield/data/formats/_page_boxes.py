"""Pages with the box of each digit: the smallest one that has all its pixels, cut where the page ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from widefield.data import WindowedImages
from widefield.detection.targets import rows_of
from widefield.geometry.interval import Interval


class InkedImages(WindowedImages, Protocol):
    """Images that know where what is drawn in them is."""

    def inked(self, index: int) -> Iterator[tuple[int, tuple[Interval, ...]]]:
        """Class numbers with intervals of rows and of columns."""


@dataclass(frozen=True)
class BoxedPages:
    """A split of pages with boxes."""

    pages: InkedImages

    def __len__(self) -> int:
        return len(self.pages)

    def name_of(self, index: int) -> str:
        return self.pages.name_of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.pages.shape(index)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pages.read(index)[0], self.target_of(index)

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        """The pixels of the window, and all boxes of the page."""
        return self.pages.read_window(index, window)[0], self.target_of(index)

    def target_of(self, index: int) -> Tensor:
        """(N, 7) without the image."""
        found = list(self.pages.inked(index))
        boxes = [[columns.start, rows.start, columns.stop, rows.stop] for _, (rows, columns) in found]
        return rows_of(torch.tensor(boxes, dtype=torch.float64), [number for number, _ in found])
