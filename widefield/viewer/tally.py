"""What is counted while tiles are written: pixels of each class, right and wrong ones, and the windows with most of these."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from widefield.viewer.label_numbers import Numbers
from widefield.viewer.pyramid import TILE, Array, Place, TileGrid

WORST = 12
"""How many windows are listed."""
APART = 12
"""Into how many parts a volume is cut, of each of which a place is listed once: the next slices are as wrong."""


@dataclass
class Tally:
    """Of one scene.  pixels: by layer, how many have each of the page's numbers.

    compared: the pixels with a class in both layers; wrong: those where it differs.  right, either: by the page's number, how
    many pixels have it in both, and in one or in both.
    """

    numbers: Numbers
    depth: int
    pixels: dict[str, Array] = field(default_factory=dict)
    right: Array | None = None
    either: Array | None = None
    compared: int = 0
    wrong: int = 0
    _windows: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)

    def add(self, at: int, place: Place, labels: Mapping[str, Array], wrong: Array | None) -> None:
        """Count a tile of level 0 of the slice `at`.  labels: the page's numbers.  wrong: 1 where they differ, else 0."""
        for name, stored in labels.items():
            self.pixels[name] = self.pixels.get(name, 0) + self._counts(stored)
        if wrong is None:
            return
        prediction, truth = labels["prediction"], labels["truth"]
        both = (prediction > 0) & (truth > 0)
        right = self._counts(truth[both & (wrong == 0)])
        either = self._counts(truth[both]) + self._counts(prediction[both]) - right
        self.right, self.either = (right, either) if self.right is None else (self.right + right, self.either + either)
        self.compared += int(both.sum())
        self._note(at, place, int(wrong.sum()), int(both.sum()))

    def _counts(self, stored: Array) -> Array:
        return np.bincount(stored.ravel(), minlength=self.numbers.count)

    def _note(self, at: int, place: Place, wrong: int, compared: int) -> None:
        self.wrong += wrong
        key = (at * APART // self.depth, place.row, place.column)
        if wrong and wrong > self._windows.get(key, {"wrong": 0})["wrong"]:
            self._windows[key] = {"slice": at, "row": place.row, "column": place.column, "wrong": wrong, "of": compared}

    def worst(self, grid: TileGrid) -> list[dict[str, Any]]:
        """The windows with most wrong pixels: slice, x and y of the centre, wrong, of."""
        found = sorted(self._windows.values(), key=lambda one: (-one["wrong"], one["slice"], one["row"], one["column"]))
        rows = []
        for one in found[:WORST]:
            down, across = grid.window(Place(0, one["row"], one["column"]))
            centre = {"y": (down.start + down.stop) / 2, "x": (across.start + across.stop) / 2, "side": TILE}
            rows.append({"slice": one["slice"], **centre, "wrong": one["wrong"], "of": one["of"]})
        return rows

    def legend(self, names: Collection[str], colours: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
        """Every class that has a name or a pixel: number, name, colour, share of the pixels by layer, IoU if compared."""
        seen = np.sum(list(self.pixels.values()), axis=0) if self.pixels else np.zeros(1, np.int64)
        named = list(names)
        rows = []
        for stored in range(1, max(len(named) + 1, len(seen))):
            if stored > len(named) and not seen[stored]:
                continue
            name = named[stored - 1] if stored <= len(named) else str(stored - 1)
            row: dict[str, Any] = {"number": stored - 1, "name": name, "colour": colours[(stored - 1) % len(colours)]}
            row |= {layer: self._share(counts, stored) for layer, counts in self.pixels.items()}
            rows.append(row | self._iou(stored))
        return rows

    def _share(self, counts: Array, stored: int) -> float:
        return float(counts[stored] / max(1, int(counts[1:].sum())))

    def _iou(self, stored: int) -> dict[str, float]:
        """Over the pixels that have a class in both layers; nothing where the class has none of them."""
        if self.right is None or self.either is None or not self.either[stored]:
            return {}
        return {"iou": float(self.right[stored] / self.either[stored])}
