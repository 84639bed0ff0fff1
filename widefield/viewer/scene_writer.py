"""Writes the tiles of one scene, and says what the page has to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.interval import natural_cut
from widefield.viewer.layers import SceneLayers
from widefield.viewer.overview import Panels, coloured, draw, marked, overview_level
from widefield.viewer.pyramid import Node, Place
from widefield.viewer.reading import axes_of
from widefield.viewer.scenes import LABELS
from widefield.viewer.tally import Tally
from widefield.viewer.tile_files import TileFiles, picture_suffix

SHOWN = ("image", *LABELS, "disagreement")
"""The layers that the overview has."""


@dataclass
class SceneWriter:
    """layers: of plane 0.  number: the scene's among those of the page."""

    layers: SceneLayers
    number: int
    tally: Tally = field(init=False)
    best: tuple[float, Panels | None] = (-math.inf, None)
    """The slice that the overview shows: that with most wrong pixels, else the middle one."""

    def __post_init__(self) -> None:
        self.tally = Tally(self.layers.numbers, self.layers.scene.extents[0])

    def write(self, files: TileFiles, overview: Path, done: Callable[[], None]) -> dict[str, Any]:
        """Write all tiles and the overview; returns what the page has to know.  done: called after each tile of a slice."""
        scene, settings = self.layers.scene, self.layers.settings
        planes = [self.layers if plane == 0 else self.layers.on(plane) for plane in settings.planes_of(scene)]
        for layers in planes:
            for at in range(scene.extents[layers.plane]):
                self._write_slice(layers, at, files, done)
        self._draw(overview)
        return self._facts(planes, overview.name)

    def _write_slice(self, layers: SceneLayers, at: int, files: TileFiles, done: Callable[[], None]) -> None:
        names = [name for name in layers.scene.layers if name in SHOWN]
        panels = Panels(layers.grid, overview_level(len(names), layers.grid))
        before, start = self.tally.wrong, min(layers.settings.level, layers.grid.levels - 1)
        for place, node in layers.tiles(at):
            if layers.plane == 0 and place.level == 0:
                self.tally.add(at, place, {name: node[name] for name in LABELS if name in node}, node.get("wrong"))
            if layers.plane == 0 and place.level == panels.level:
                self._add_panels(panels, layers, place, node)
            if place.level < start:
                continue
            for name, content in layers.contents(place, node):
                key = f"{self.number}/{name}/{layers.plane}-{at}/{place.level}/{place.row}_{place.column}"
                files.add(key, content)
            done()
        if layers.plane == 0:
            middle = -abs(at - layers.scene.extents[0] / 2)
            score = self.tally.wrong - before if self.tally.wrong else middle - layers.scene.extents[0]
            self.best = max(self.best, (score, panels), key=lambda one: one[0])

    def _add_panels(self, panels: Panels, layers: SceneLayers, place: Place, node: Node) -> None:
        picture = layers.display.as_bytes(node["image"], node["holds"])
        image = np.broadcast_to(picture, (3, *picture.shape[1:])).transpose(1, 2, 0)
        panels.add("image", place, image)
        for name in LABELS:
            if name in node:
                panels.add(name, place, coloured(node[name], list(layers.settings.colours)))
        if "wrong" in node:
            panels.add("disagreement", place, marked(node["wrong"] / layers.grid.area(place), image))

    def _draw(self, path: Path) -> None:
        panels = self.best[1]
        assert panels is not None
        titles = {"image": self.layers.scene.name}
        if self.tally.compared:
            titles["disagreement"] = f"disagreement: {100 * self.tally.wrong / self.tally.compared:.2f} %"
        draw(panels.pixels, titles, path)

    # ------------------------------------------------------------------------------------------ what the page knows

    def _facts(self, planes: list[SceneLayers], overview: str) -> dict[str, Any]:
        scene, settings, info = self.layers.scene, self.layers.settings, self.layers.scene.image.info
        tally, numbers = self.tally, self.layers.numbers
        return {
            "name": scene.name, "overview": overview, "extents": scene.extents, "layers": scene.layers,
            "suffix": picture_suffix(len(self.layers.display.bands)), "wide": numbers.dtype == "uint16",
            "planes": [self._plane(layers) for layers in planes],
            "shown": self.layers.display.in_words(), "format": f"{info.format}, {info.channels} x {info.dtype}",
            "spacing": info.spacing, "unit": info.unit, "affine": info.affine, "world": _name_of(info.world),
            "cuts": self._cuts(), "wrong": tally.wrong, "compared": tally.compared, "worst": tally.worst(self.layers.grid),
            "legend": tally.legend(settings.classes, list(settings.colours)) if scene.labels or settings.classes else [],
        }  # fmt: skip

    def _plane(self, layers: SceneLayers) -> dict[str, Any]:
        rows, columns = axes_of(layers.plane)
        start = min(layers.settings.level, layers.grid.levels - 1)
        return {"plane": layers.plane, "rows": rows, "columns": columns, "start": start, "levels": layers.grid.levels}

    def _cuts(self) -> list[list[int]]:
        """By axis of (depth, height, width), the first pixels of tiles but the first one."""
        size = self.layers.scene.image.info.size
        tiles = [*self.layers.settings.space, 1, 1, 1][: len(size)]
        inner = [sorted({*natural_cut(extent, parts)} - {0, extent}) for extent, parts in zip(size, tiles, strict=True)]
        return [[]] * (3 - len(size)) + inner


def _name_of(world: str) -> str:
    """Of a coordinate system, as its text names it."""
    return world.split('"')[1] if world.count('"') > 1 else world
