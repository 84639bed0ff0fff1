"""How scenes are shown, as the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widefield.viewer.scenes import Scene

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Settings:
    """colours: of the classes by number, and again from the first.  classes: their names; none: numbers are the names.

    bands: which are shown, from 1 on; limits: what is black and what is white.  ignored: numbers of labels that are no class.
    level: the first that is written.  planes: whether volumes are cut along all three axes.  space: into how many tiles the run
    cut an image, along each dim.  most_tiles: above so many, nothing is written,
    for many small files are slow on many disks.
    """

    colours: Sequence[Colour]
    classes: Sequence[str] = ()
    bands: Sequence[int] | None = None
    limits: tuple[float, float] | None = None
    ignored: Sequence[int] | None = None
    level: int = 0
    planes: bool = False
    space: Sequence[int] = ()
    most_tiles: int = 4000

    def planes_of(self, scene: Scene) -> tuple[int, ...]:
        return (0, 1, 2) if self.planes and scene.extents[0] > 1 else (0,)
