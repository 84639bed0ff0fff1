"""What a viewer will cost, before it is written: tiles exactly, bytes from some tiles that are made for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from widefield.quantity import bytes_text, count_of
from widefield.viewer.layers import grid_of
from widefield.viewer.scenes import Scene
from widefield.viewer.settings import Settings


@dataclass(frozen=True)
class ViewerCost:
    """tiles: the most files of tiles there will be; those of one number have none.  size: about their bytes."""

    tiles: int
    size: int

    def __str__(self) -> str:
        return f"{count_of(self.tiles, 'tile')} and about {bytes_text(self.size)}"


def tiles_of(scene: Scene, settings: Settings, level: int) -> int:
    """How many tiles a scene has, from a level on."""
    grids = [(scene.extents[plane], grid_of(scene, plane)) for plane in settings.planes_of(scene)]
    return len(scene.layers) * sum(slices * grid.tiles(min(level, grid.levels - 1)) for slices, grid in grids)


def estimate(scenes: Sequence[Scene], settings: Settings, each: float, output: Path) -> ViewerCost:
    """What a viewer of these scenes will cost.  each: the bytes of a tile.

    ValueError: there are more than `settings.most_tiles`, or the disk has less space.
    """

    def at(level: int) -> ViewerCost:
        tiles = sum(tiles_of(scene, settings, level) for scene in scenes)
        return ViewerCost(tiles, round(each * tiles))

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
    return "add --first N for the first N images" if len(scenes) > 1 else "leave out layers"


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
