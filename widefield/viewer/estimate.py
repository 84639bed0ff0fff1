"""What a viewer will cost, before it is written: tiles exactly, bytes from some tiles that are made for it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from widefield.quantity import bytes_text, count_of
from widefield.viewer.layers import SceneLayers, grid_of
from widefield.viewer.pyramid import TILE, Place, TileGrid
from widefield.viewer.reading import spread
from widefield.viewer.scenes import Scene
from widefield.viewer.settings import Settings
from widefield.viewer.tile_files import encoded, number_of


@dataclass(frozen=True)
class ViewerCost:
    """tiles: the most files of tiles there will be; those of one number have none.  size: about their bytes."""

    tiles: int
    size: int

    def __str__(self) -> str:
        return f"{count_of(self.tiles, 'tile')} and about {bytes_text(self.size)}"


def tiles_of(scene: Scene, settings: Settings, level: int) -> int:
    """How many tiles a scene has, from a level on."""
    return len(scene.layers) * sum(slices * grid.tiles(level) for slices, grid in _grids(scene, settings))


def pixels_of(scene: Scene, settings: Settings, level: int) -> int:
    """How many pixels these have."""
    return len(scene.layers) * sum(slices * grid.pixels(level) for slices, grid in _grids(scene, settings))


def _grids(scene: Scene, settings: Settings) -> list[tuple[int, TileGrid]]:
    """Of each plane: how many slices it has, and the tiles of one."""
    return [(scene.extents[plane], grid_of(scene, plane)) for plane in settings.planes_of(scene)]


def bytes_per_pixel(layers: SceneLayers) -> float:
    """Of a layer's tiles on average, by those of some places and slices, which are made for it.

    ImageFileError: a file cannot be read.  ValueError: it does not fit the settings.
    """
    rows, columns = (
        {(run.start + run.stop) // (2 * TILE) for run in spread(extent, TILE, 2)} for extent in layers.grid.size_at(0)
    )
    slices = [run.start for run in spread(layers.scene.extents[0], 1, 3)][:2]
    size = pixels = 0
    for at, row, column in product(slices, sorted(rows), sorted(columns)):
        place = Place(0, row, column)
        for _, content in layers.contents(place, layers.node(at, place)):
            size += len(encoded("", content)) if number_of(content) is None else 0
            pixels += math.prod(map(len, layers.grid.window(place)))
    return size / pixels


def estimate(scenes: Sequence[Scene], settings: Settings, each: float, output: Path) -> ViewerCost:
    """What a viewer of these scenes will cost.  each: the bytes of a pixel of a layer.

    ValueError: there are more than `settings.most_tiles`, or the disk has less space.
    """

    def at(level: int) -> ViewerCost:
        tiles, pixels = (sum(count(scene, settings, level) for scene in scenes) for count in (tiles_of, pixels_of))
        return ViewerCost(tiles, round(each * pixels))

    found, room = at(settings.level), shutil.disk_usage(_existing(output)).free
    if found.tiles > settings.most_tiles:
        raise ValueError(
            f"the viewer of {count_of(len(scenes), 'image')} would be {found}, and {settings.most_tiles:,} tiles are allowed; "
            f"{_less(at, scenes, settings)}, or --most-tiles {found.tiles}. A server on this machine that cuts tiles when they "
            "are looked at is not there yet"
        )
    if found.size > room:
        raise ValueError(
            f"the viewer would be {found}, and the disk of {output} has {bytes_text(room)} left; free some space, name another "
            f"--output, or {_less(at, scenes, settings)}"
        )
    return found


def _less(at: Callable[[int], ViewerCost], scenes: Sequence[Scene], settings: Settings) -> str:
    """What to write for fewer tiles: the least coarse level that is allowed."""
    levels = range(settings.level + 1, max(grid_of(scene, 0).levels for scene in scenes))
    found = next((level for level in levels if at(level).tiles <= settings.most_tiles), None)
    if found is not None:
        return f"add --level {found} (pixels of {2**found} x {2**found}: {at(found)})"
    if len(scenes) > 1:
        return "add --first N for the first N images"
    return "leave --planes out" if settings.planes else "leave layers out"


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
