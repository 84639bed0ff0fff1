"""Slices of DICOM: their order, whether they make a volume, and where it is in the world.  No library, no pixels.

Positions and directions are the file's: mm in LPS (towards the left, the back and the head of the patient).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from widefield.image_files.info import Affine

SAME_PLACE_MM = 1e-3
UNEVEN = 0.05
"""Of the distance between slices: how far one may lie beside its place, as rounding of positions puts it."""
TURNED = 5e-3
"""How far two directions may differ, per coordinate of a unit vector."""
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Slice:
    """One frame of one file.

    position: of the centre of the first pixel.  directions: of a row, along x, and of a column, along y.  spacing: (y, x), in
    mm.  Each is empty where the file does not say it.  slope, intercept: from stored to true numbers.  padding: the true number
    of pixels that hold nothing.
    """

    file: Path
    frame: int = 0
    position: tuple[float, ...] = ()
    directions: tuple[float, ...] = ()
    spacing: tuple[float, ...] = ()
    slope: float = 1.0
    intercept: float = 0.0
    padding: float | None = None

    def __str__(self) -> str:
        return f"{self.file.name}, frame {self.frame + 1}" if self.frame else self.file.name


def in_order(slices: Sequence[Slice]) -> list[Slice]:
    """By their place along the normal of the slices (row x column), whatever their names and numbers.

    ValueError: one has no place; they have several directions or spacings; two are at one place; they are not evenly apart.
    """
    if len(slices) == 1:
        return list(slices)
    _check_alike(slices)
    normal = _normal(slices[0])
    ordered = sorted(slices, key=lambda one: float(np.dot(one.position, normal)))
    places = np.array([one.position for one in ordered])
    steps = np.diff(places, axis=0)
    for before, after, step in zip(ordered, ordered[1:], steps @ normal, strict=False):
        if step < SAME_PLACE_MM:
            raise ValueError(
                f"{before} and {after} are at the same place, {_shown(after.position)} mm: it is a series over time, or of "
                "several kinds of image; put each volume into a folder of its own"
            )
    usual = np.median(steps, axis=0)
    apart = np.linalg.norm(steps - usual, axis=1)
    if apart.max() > UNEVEN * np.linalg.norm(usual):
        worst = int(apart.argmax())
        raise ValueError(
            f"{ordered[worst]} and {ordered[worst + 1]} are {np.linalg.norm(steps[worst]):.4g} mm apart, and most of the "
            f"{len(ordered)} slices {np.linalg.norm(usual):.4g} mm: is one missing? Copy the series again, or put the slices "
            "that are evenly apart into a folder of their own"
        )
    return ordered


def affine_of(ordered: Sequence[Slice]) -> Affine:
    """From the index (z, y, x) of a pixel to RAS, in mm, of at least two slices in order.  A tilted gantry makes it oblique."""
    first, last = ordered[0], ordered[-1]
    along_y, along_x = first.spacing
    affine = np.eye(4)
    affine[:3, 0] = (np.array(last.position) - first.position) / (len(ordered) - 1)
    affine[:3, 1] = np.array(first.directions[3:]) * along_y
    affine[:3, 2] = np.array(first.directions[:3]) * along_x
    affine[:3, 3] = first.position
    return tuple(tuple(float(number) for number in row) for row in LPS_TO_RAS @ affine)


def _check_alike(slices: Sequence[Slice]) -> None:
    first = slices[0]
    for one in slices:
        if not one.position or not one.directions or not one.spacing:
            raise ValueError(
                f"{one} does not say where its slice is, so that {len(slices)} of them are no volume; where it is a film, or "
                "pictures that do not belong together, save each as a file and open that"
            )
        for words, mine, firsts, tolerance in (
            ("directions", one.directions, first.directions, TURNED),
            ("spacings", one.spacing, first.spacing, TURNED * min(first.spacing)),
        ):
            if np.abs(np.subtract(mine, firsts)).max() > tolerance:
                raise ValueError(
                    f"{first} and {one} have the {words} {_shown(firsts)} and {_shown(mine)}: they are no slices of one "
                    "volume, as where a folder has its scout too; put each volume into a folder of its own"
                )


def _normal(one: Slice) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.cross(one.directions[:3], one.directions[3:])


def _shown(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(f"{number:.6g}" for number in numbers) + ")"
