"""Volumes seen through flips and crops: along each axis, which source voxel an output voxel is.  No value is interpolated.

A position is (plane, row, column).  Each axis is by itself, so a window of the output needs a box of the source, and its voxels
are copies.  What warp.py is for images, this is for volumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from widefield.data.spatial.border import Array, Border, folded, label_outside, pixels_shown, rounded, selected, with_label
from widefield.geometry.box import Box
from widefield.geometry.interval import Interval


@dataclass(frozen=True)
class AxisMap:
    """Along each axis, output voxel q is source voxel sign * q + start, which may be outside.  source, output: (D, H, W)."""

    source: tuple[int, ...]
    output: tuple[int, ...]
    sign: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def identity(cls, size: tuple[int, ...]) -> AxisMap:
        return cls(size, size, (1,) * len(size), (0,) * len(size))

    @property
    def is_identity(self) -> bool:
        return self == AxisMap.identity(self.source)

    def then(self, after: AxisMap) -> AxisMap:
        """The map of this and, on its output, of another."""
        sign = tuple(one * other for one, other in zip(self.sign, after.sign, strict=True))
        start = tuple(s * other + one for s, other, one in zip(self.sign, after.start, self.start, strict=True))
        return AxisMap(self.source, after.output, sign, start)

    def undone(self) -> AxisMap:
        """The map from the output back to the source."""
        return AxisMap(self.output, self.source, self.sign, tuple(-s * at for s, at in zip(self.sign, self.start, strict=True)))

    def at(self, voxel: Sequence[int]) -> tuple[int, ...]:
        """The source voxel of an output voxel."""
        return tuple(s * one + first for s, one, first in zip(self.sign, voxel, self.start, strict=True))

    def places(self, axis: int, run: Interval) -> Array:
        """The source voxels of an interval of the output, along an axis."""
        return self.sign[axis] * np.arange(run.start, run.stop) + self.start[axis]


@dataclass(frozen=True)
class AxisWarp:
    """A map with what is shown outside of the volume.  fill: one value, or one per channel, in units of the voxels."""

    map: AxisMap
    border: Border = "constant"
    fill: tuple[float, ...] = (0.0,)

    def source_box(self, window: Box) -> Box:
        """The box of source voxels that a window of the output needs, at least one voxel."""
        found = []
        for axis, (run, extent) in enumerate(zip(window, self.map.source, strict=True)):
            ends = [self.map.sign[axis] * voxel + self.map.start[axis] for voxel in (run.start, run.stop - 1)]
            found.append(pixels_shown(min(ends), max(ends), extent, self.border))
        return tuple(found)

    def view(
        self, part: Tensor, labels: Tensor | None, box: Box, window: Box, *, outside: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """As Warp.view: the voxels (C, d, h, w) of a window of the output, and their labels."""
        far = self._far(window)
        if labels is not None and outside is None:
            outside = label_outside(far, labels, len(window))
        if labels is not None and outside is not None:
            labels = with_label(labels, outside)
        places = [self._shown(axis, run, box[axis].start) for axis, run in enumerate(window)]
        made, marks = (None if one is None else _copied(one, places) for one in (part, labels))
        assert made is not None
        if far is not None:
            fill = rounded(torch.tensor(self.fill, dtype=torch.float64).view(-1, *[1] * len(window)), made.dtype)
            made = torch.where(far, fill, made) if self.border == "constant" else made
            marks = None if marks is None else torch.where(far, torch.tensor(outside, dtype=marks.dtype), marks)
        return made, marks

    def _shown(self, axis: int, run: Interval, first: int) -> Array:
        """The source voxels that an interval of the output shows, counted from `first`."""
        asked, extent = self.map.places(axis, run), self.map.source[axis]
        inside = not len(asked) or (asked.min() >= 0 and asked.max() < extent)
        shown = asked if inside else folded(asked.astype(np.float64), extent, self.border)
        return shown.astype(np.int64) - first

    def _far(self, window: Box) -> Tensor | None:
        """Where a window shows what is outside of the volume, (d, h, w) bool; None where it does so nowhere."""
        places = [self.map.places(axis, run) for axis, run in enumerate(window)]
        beyond = [(at < 0) | (at >= extent) for at, extent in zip(places, self.map.source, strict=True)]
        if not any(one.any() for one in beyond):
            return None
        planes, rows, columns = map(torch.from_numpy, beyond)
        return planes[:, None, None] | rows[:, None] | columns


def _copied(planes: Tensor, places: list[Array]) -> Tensor:
    for dim, at in enumerate(places):
        planes = selected(planes, at, dim - len(places))
    return planes.contiguous()
