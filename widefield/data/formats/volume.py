"""Synthetic volumes of any size, for segmentation: class 0 is background, 1 vessels, 2 blobs.

Space is a lattice of cubic cells, in the units of `spacing`, say mm.  Each cell has a node, and vessels run from nodes to those
of neighbouring cells: straight tubes whose radius and brightness change evenly from node to node.  Some cells have a blob, an
ellipsoid.  Both are as bright, so what tells them apart is shape.  The background has a coarse and a fine grain.  A voxel has
the class of what its center lies in; a blob hides a vessel.

Every random number is a hash of the volume, the cell or voxel and its purpose.  So a volume is a function of (seed, split,
index); a window of it equals that part of the whole bit for bit, and its cost is proportional to its own voxels.
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
from widefield.data.place_hashes import place_hashes
from widefield.data.transforms import seed_of
from widefield.geometry import Interval
from widefield.geometry.box import Box, full_box, within

CLASSES = ["background", "vessel", "blob"]
CELL = 20.0
"""The side of a cell, as all lengths here in the units of `spacing`."""
RADIUS = (1.4, 3.0)
"""Of a vessel at its nodes."""
BLOB = (3.5, 7.0)
"""Half the axes of a blob."""
EDGE = 1.5
"""Over so much the light of a surface rises from none to all."""
SLAB_VOXELS = 2**19
"""Voxels rendered at a time, so that temporary memory is small."""
GRAIN = 24.0
"""Between the points of the background's coarse grain."""
Array = np.ndarray[Any, Any]
Place = tuple[float, float, float]


@dataclass(frozen=True)
class VolumeLayout:
    """Voxels of a volume, their lengths, and the probabilities of a vessel between two nodes and of a blob in a cell."""

    size: tuple[int, int, int]
    spacing: tuple[float, float, float]
    vessels: float
    blobs: float


@dataclass(frozen=True)
class Tube:
    """A vessel between two nodes: their places, radii and brightness, from 0 to 1."""

    ends: tuple[Place, Place]
    radii: tuple[float, float]
    lights: tuple[float, float]

    def hull(self) -> list[tuple[float, float]]:
        """Along each axis, where it begins and ends."""
        reach = max(self.radii) + EDGE
        return [(min(pair) - reach, max(pair) + reach) for pair in zip(*self.ends, strict=True)]

    def seen(self, at: list[Array]) -> tuple[Array, Array]:
        """How deep inside positions are, negative outside, and the brightness there."""
        start, along = self.ends[0], [b - a for a, b in zip(*self.ends, strict=True)]
        z, y, x = (axis - first for axis, first in zip(at, start, strict=True))
        t = ((z * along[0] + y * along[1]) + x * along[2]) / sum(step * step for step in along)
        t = np.clip(t, 0.0, 1.0)
        off = np.sqrt(((z - t * along[0]) ** 2 + (y - t * along[1]) ** 2) + (x - t * along[2]) ** 2)
        radius, light = (low + t * (high - low) for low, high in (self.radii, self.lights))
        return radius - off, light


@dataclass(frozen=True)
class Blob:
    """An ellipsoid with its center, half axes and brightness."""

    center: Place
    axes: Place
    light: float

    def hull(self) -> list[tuple[float, float]]:
        return [(at - axis - EDGE, at + axis + EDGE) for at, axis in zip(self.center, self.axes, strict=True)]

    def seen(self, at: list[Array]) -> tuple[Array, Array]:
        """As that of a tube; the depth is that of the sphere that the ellipsoid is scaled to, by its mean axis."""
        z, y, x = ((axis - middle) / half for axis, middle, half in zip(at, self.center, self.axes, strict=True))
        depth = (1.0 - np.sqrt((z**2 + y**2) + x**2)) * (sum(self.axes) / 3)
        return depth, np.float64(self.light)


@dataclass(frozen=True)
class Volumes:
    """One split: `count` volumes."""

    split: str
    count: int
    seed: int
    layout: VolumeLayout

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        return f"volume/{self.split}/{index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (1, *self.layout.size)

    def spacing_of(self, index: int) -> tuple[float, ...]:
        return self.layout.spacing

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read_window(index, full_box(self.layout.size))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        key = seed_of(self.seed, "volume", self.split, index)
        image = np.empty([len(run) for run in window], dtype=np.uint8)
        label = np.zeros_like(image)
        planes = max(1, SLAB_VOXELS // max(1, len(window[1]) * len(window[2])))
        for start in range(window[0].start, window[0].stop, planes):
            slab = (Interval(start, min(start + planes, window[0].stop)), *window[1:])
            part = within(window, slab)
            image[part], label[part] = _rendered(self.layout, key, slab)
        return torch.from_numpy(image).unsqueeze(0), torch.from_numpy(label)


def _rendered(layout: VolumeLayout, key: int, window: Box) -> tuple[Array, Array]:
    """The voxels of a window, and their classes."""
    shape = [len(run) for run in window]
    image, light, label = _background(layout, key, window), np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
    for number, things in enumerate((_tubes(layout, key, window), _blobs(layout, key, window)), start=1):
        for thing in things:
            box = _box_of(thing.hull(), layout.spacing, window)
            if not all(len(run) for run in box):
                continue
            depth, bright = thing.seen(_positions(box, layout.spacing))
            part = within(window, box)
            shown = (np.clip(depth / EDGE + 0.5, 0.0, 1.0) * bright).astype(np.float32)
            np.maximum(light[part], shown, out=light[part])
            label[part][depth >= 0] = number
    return image + ((255 - image) * light).astype(np.uint8), label


def _box_of(hull: list[tuple[float, float]], spacing: Place, window: Box) -> Box:
    """The voxels of a window whose centers may be in a hull."""
    runs = [Interval(int(low // step) - 1, int(high // step) + 2) for (low, high), step in zip(hull, spacing, strict=True)]
    return tuple(run & one for run, one in zip(runs, window, strict=True))


def _positions(box: Box, spacing: Place) -> list[Array]:
    """The centers of voxels along each axis, such that the three broadcast to the box."""
    lines = [(np.arange(run.start, run.stop) + 0.5) * step for run, step in zip(box, spacing, strict=True)]
    return [lines[0][:, None, None], lines[1][:, None], lines[2]]


# ---------------------------------------------------------------------------------------------- what there is


def _cells(layout: VolumeLayout, window: Box) -> list[Array]:
    """Along each axis, the cells whose things may reach into a window, tubes to the next cells among them, and one more."""
    reach = max(RADIUS[1], BLOB[1]) + EDGE
    found = []
    for run, step in zip(window, layout.spacing, strict=True):
        first, last = (run.start * step - reach) // CELL, (run.stop * step + reach) // CELL
        found.append(np.arange(int(first) - 1, int(last) + 2))
    return found


def _tubes(layout: VolumeLayout, key: int, window: Box) -> Iterator[Tube]:
    """From the node of each cell to that of the next one along each axis, where there is a vessel."""
    cells = _cells(layout, window)
    places = np.stack([_within_cells(key, cells, axis) for axis in range(3)], axis=-1)
    radii, lights = RADIUS[0] + (RADIUS[1] - RADIUS[0]) * _chances(key, cells, 3), _lights(key, cells, 4)
    for axis in range(3):
        for start in map(tuple, np.argwhere(_chances(key, cells, 10 + axis) < layout.vessels)):
            stop = tuple(number + (axis == dim) for dim, number in enumerate(start))
            if stop[axis] < len(cells[axis]):
                ends, thick, bright = ((of[start], of[stop]) for of in (places, radii, lights))
                yield Tube((tuple(ends[0].tolist()), tuple(ends[1].tolist())), thick, bright)


def _blobs(layout: VolumeLayout, key: int, window: Box) -> Iterator[Blob]:
    cells = _cells(layout, window)
    centers = np.stack([_within_cells(key, cells, 20 + axis) for axis in range(3)], axis=-1)
    axes = np.stack([BLOB[0] + (BLOB[1] - BLOB[0]) * _chances(key, cells, 23 + axis) for axis in range(3)], axis=-1)
    lights = _lights(key, cells, 26)
    for at in map(tuple, np.argwhere(_chances(key, cells, 27) < layout.blobs)):
        yield Blob(tuple(centers[at].tolist()), tuple(axes[at].tolist()), float(lights[at]))


def _within_cells(key: int, cells: list[Array], purpose: int) -> Array:
    """A place along the axis `purpose % 10` in each cell, not near its faces."""
    axis = purpose % 10
    first = cells[axis].reshape(-1, *[1] * (2 - axis))
    return (first + 0.2 + 0.6 * _chances(key, cells, purpose)) * CELL


def _lights(key: int, cells: list[Array], purpose: int) -> Array:
    return 0.25 + 0.35 * _chances(key, cells, purpose)


def _chances(key: int, at: list[Array], purpose: int) -> Array:
    """A uniform number in [0, 1) for each cell."""
    return _hashes(key, at, purpose) / 2.0**32


def _background(layout: VolumeLayout, key: int, window: Box) -> Array:
    """Voxels between 16 and 111 of 255: a coarse grain, linear between points, and a fine one of single voxels.

    In integers, so that the bits of a voxel do not depend on the window.
    """
    steps = [max(1, round(GRAIN / length)) for length in layout.spacing]
    points = [
        np.arange(run.start // step, max(run.start, run.stop - 1) // step + 2) for run, step in zip(window, steps, strict=True)
    ]
    coarse = (_hashes(key, points, 30) >> np.uint32(26)).astype(np.int64)  # 0..63
    for axis, (run, step) in enumerate(zip(window, steps, strict=True)):
        voxels = np.arange(run.start, run.stop)
        before, rest = voxels // step - run.start // step, (voxels % step).reshape(-1, *[1] * (2 - axis))
        coarse = coarse.take(before, axis) * (step - rest) + coarse.take(before + 1, axis) * rest
    fine = _hashes(key, [np.arange(run.start, run.stop) for run in window], 31) >> np.uint32(27)  # 0..31
    return (16 + coarse // (steps[0] * steps[1] * steps[2]) + fine).astype(np.uint8)


def _hashes(key: int, at: list[Array], purpose: int) -> Array:
    z, y, x = at
    return place_hashes(key, z[:, None, None], y[:, None], x, purpose=purpose)


# ---------------------------------------------------------------------------------------------- options


def open_dataset(
    config: DataConfig,
    *,
    size: tuple[int, int, int] = (24, 64, 64),
    volumes: tuple[int, int] = (32, 8),
    spacing: tuple[float, float, float] = (2.0, 1.0, 1.0),
    vessels: float = 0.5,
    blobs: float = 0.4,
    seed: int = 0,
) -> Dataset:
    """Volumes to train on and to evaluate.

    size: depth, height and width.  volumes: how many to train on and to evaluate.  spacing: the lengths of a voxel along these,
    where a cell is 20 and a vessel's radius 1.4 to 3.  vessels: the probability of one between two neighbouring nodes.
    blobs: that of one in a cell.  seed: of the volumes, independent of the run's.
    ValueError: options out of range; data.path or data.hold_out is set.
    """
    if config.path is not None or config.hold_out is not None:
        raise ValueError("data.name=volume is built in; leave data.path and data.hold_out out")
    _check_counts(size=(size, 3), volumes=(volumes, 2))
    if not (isinstance(spacing, list | tuple) and len(spacing) == 3 and all(_is_length(one) for one in spacing)):
        raise ValueError(f"data.options.spacing is {spacing!r}; three lengths from 0.01 to {CELL:g} are wanted, as [2, 1, 1]")
    for name, chance in (("vessels", vessels), ("blobs", blobs)):
        if not 0 <= chance <= 1:
            raise ValueError(f"data.options.{name} is {chance!r}; a probability from 0 to 1 is wanted")
    lengths = (float(spacing[0]), float(spacing[1]), float(spacing[2]))
    layout = VolumeLayout((size[0], size[1], size[2]), lengths, float(vessels), float(blobs))
    train, evaluate = (Volumes(split, count, seed, layout) for split, count in zip(("train", "evaluate"), volumes, strict=True))
    # mean and standard deviation of the voxels of the 32 training volumes that the defaults make
    return Dataset(train, evaluate, CLASSES, 1, MEAN, STD, in_memory=False, labels="pixels", dims=3)


def _is_length(one: Any) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool) and 0.01 <= one <= CELL


def _check_counts(**options: tuple[Any, int]) -> None:
    for name, (given, count) in options.items():
        if not (isinstance(given, list | tuple) and len(given) == count and all(type(one) is int and one > 0 for one in given)):
            example = [24, 64, 64] if count == 3 else [32, 8]
            raise ValueError(f"data.options.{name} is {given!r}; {count} whole numbers above 0 are wanted, as {example}")


MEAN, STD = [0.269], [0.095]
CASES = [({"options": {"size": [12, 40, 36], "volumes": [3, 2]}}, 3, 2, 3)]
"""As in digits.py."""
