"""Writes a viewer: the folder of a page, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from widefield.viewer.estimate import ViewerCost, bytes_per_pixel, estimate, tiles_of
from widefield.viewer.layers import SceneLayers
from widefield.viewer.pyramid import TILE
from widefield.viewer.scene_writer import SceneWriter
from widefield.viewer.scenes import Scene
from widefield.viewer.settings import Settings
from widefield.viewer.tile_files import TileFiles

MARK = "// written by widefield view\n"
"""How the page's data begins.  A folder with such data may be replaced."""
DATA = "data.js"
FILES = ("index.html", "viewer.css", "tiles.js", "viewer.js", "controls.js")
SAMPLED = 4
"""Of how many scenes some tiles are made, to estimate the bytes of all."""


@dataclass(frozen=True)
class Written:
    """page: the file to open.  tiles, size: the files of tiles, and their bytes.  scenes: what the page knows of each."""

    page: Path
    tiles: int
    size: int
    scenes: list[dict[str, Any]]


@dataclass(frozen=True)
class Viewer:
    """Scenes, and how they are shown."""

    scenes: Sequence[Scene]
    settings: Settings

    @property
    def steps(self) -> int:
        """How many times `write` calls `done`."""
        level = self.settings.level
        return sum(tiles_of(scene, self.settings, level) // len(scene.layers) for scene in self.scenes)

    def estimate(self, output: Path) -> ViewerCost:
        """What it will cost in a folder.  ValueError: that is too much, or the scenes do not fit the settings."""
        sampled = [bytes_per_pixel(SceneLayers(scene, self.settings)) for scene in self.scenes[:SAMPLED]]
        return estimate(self.scenes, self.settings, sum(sampled) / len(sampled), output)

    def write(self, output: Path, done: Callable[[], None] = lambda: None) -> Written:
        """Write it to the folder `output`, in place of a viewer that is there.  done: called after each tile of a slice.

        ValueError: there is something else, or the disk refuses.
        """
        check_place(output)
        with _beside(output) as folder:
            files, known = TileFiles(folder / "tiles"), []
            for number, scene in enumerate(self.scenes):
                name = "overview.png" if len(self.scenes) == 1 else f"overview-{number}.png"
                known.append(SceneWriter(SceneLayers(scene, self.settings), number).write(files, folder / name, done))
                scene.close()
            tree = {"tile": TILE, "same": files.same, "scenes": known}
            (folder / DATA).write_text(f"{MARK}const WIDEFIELD = {json.dumps(tree)};\n", encoding="ascii")
            for name in FILES:
                (folder / name).write_bytes((resources.files(__package__) / name).read_bytes())
        return Written(output / FILES[0], files.count, files.size, known)


def check_place(output: Path) -> None:
    """ValueError: there is something that is no viewer."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    data = output / DATA
    if data.is_file() and data.read_bytes().startswith(MARK.encode()):
        return
    raise ValueError(f"{output} is there and is no viewer, so it is not replaced; name another --output")


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A folder beside `output`, which takes its place in the end.  ValueError: the disk refuses."""
    output = output.absolute()
    folder = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        if output.exists():
            shutil.rmtree(output)
        os.replace(folder, output)
    except OSError as error:
        raise ValueError(
            f"the viewer cannot be written to {output} ({error}); free some space, or name another --output"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
