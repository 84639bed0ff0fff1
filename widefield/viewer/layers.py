"""The layers of a scene: what is read for a tile, and what the tile of each layer shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from widefield.geometry.interval import Interval
from widefield.viewer.display import Display, display_of
from widefield.viewer.label_numbers import Numbers, numbers_of
from widefield.viewer.pyramid import Array, Node, Place, TileGrid, walk
from widefield.viewer.reading import RegionReader, axes_of
from widefield.viewer.scenes import LABELS, Scene
from widefield.viewer.settings import Settings
from widefield.viewer.tile_files import Content, PictureTile


def grid_of(scene: Scene, plane: int) -> TileGrid:
    """The tiles of the slices of a plane."""
    rows, columns = axes_of(plane)
    return TileGrid(scene.extents[rows], scene.extents[columns])


@dataclass
class SceneLayers:
    """The layers of the slices of one plane.

    Nodes have `image`, the sums of its bands, and `holds`, of how many; the page's numbers of the labels; `wrong`, how many
    pixels differ; and `probability`, its sums.
    """

    scene: Scene
    settings: Settings
    plane: int = 0
    _readers: dict[str, RegionReader] = field(default_factory=dict)

    @cached_property
    def display(self) -> Display:
        return display_of(self.scene.image, self.settings.bands, self.settings.limits)

    @cached_property
    def numbers(self) -> Numbers:
        return numbers_of(self.scene.labels.values(), len(self.settings.classes), self.settings.ignored)

    @cached_property
    def grid(self) -> TileGrid:
        return grid_of(self.scene, self.plane)

    def on(self, plane: int) -> SceneLayers:
        """The layers of another plane, shown alike."""
        other = SceneLayers(self.scene, self.settings, plane)
        other.display, other.numbers = self.display, self.numbers
        return other

    def tiles(self, at: int) -> Iterator[tuple[Place, Node]]:
        """All tiles of the slice `at`, as `walk` gives them."""
        return walk(self.grid, lambda place: self.node(at, place), frozenset(LABELS))

    def node(self, at: int, place: Place) -> Node:
        """Of a tile of level 0.  ImageFileError: a file cannot be read."""
        rows, columns = self.grid.window(place)
        pixels, valid = self._read("image", at, rows, columns)
        found = dict(zip(("image", "holds"), self.display.sums(pixels, valid), strict=True))
        for name in LABELS:
            if name in self.scene.labels:
                stored, _ = self._read(name, at, rows, columns)
                found[name] = self.numbers.stored(stored[0], self.scene.labels[name])
        if len(self.scene.labels) == len(LABELS):
            prediction, truth = (found[name] for name in LABELS)
            found["wrong"] = ((prediction != truth) & (prediction > 0) & (truth > 0)).astype(np.uint32)
        if self.scene.probabilities is not None:
            box = [slice(at, at + 1)] * 3
            for axis, run in zip(axes_of(self.plane), (rows, columns), strict=True):
                box[axis] = slice(run.start, run.stop)
            likely = self.scene.probabilities[(slice(None), *box)].take(0, 1 + self.plane)
            found["probability"] = np.nan_to_num(likely.astype(np.float64))
        return found

    def _read(self, name: str, at: int, rows: Interval, columns: Interval) -> tuple[Array, Array | None]:
        if name not in self._readers:
            file = self.scene.image if name == "image" else self.scene.labels[name]
            self._readers[name] = RegionReader(file, self.plane, needs_valid=name == "image")
        return self._readers[name].read(at, rows, columns)

    def contents(self, place: Place, node: Node) -> Iterator[tuple[str, Content]]:
        """What each layer's tile shows, by the layer's name.

        The share of wrong pixels, and each probability, of the pixels that one covers: 255 is 1.  A share is 0 only if none is
        wrong, so that what is thin does not vanish.
        """
        yield "image", PictureTile(self.display.as_bytes(node["image"], node["holds"]), node["holds"])
        for name in LABELS:
            if name in node:
                yield name, node[name]
        area = self.grid.area(place)
        if "wrong" in node:
            share = np.floor(255 * node["wrong"] / area + 0.5)
            yield "disagreement", np.where(node["wrong"] > 0, np.maximum(share, 1), 0).astype(np.uint8)
        for number, sums in enumerate(node.get("probability", ())):
            yield f"probability-{number}", np.floor(255 * np.clip(sums / area, 0, 1) + 0.5).astype(np.uint8)
