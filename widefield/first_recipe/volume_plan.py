"""What suits volumes of some sizes and spacings: a common spacing, a patch, and by what a network shrinks along each axis.

The rules are those of nnU-Net v2 (Isensee et al. 2021, doi:10.1038/s41592-020-01008-z, and its ExperimentPlanner), but for
sizes of patches, which follow from the memory that is there.  Axes are depth, height, width; lengths are in mm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Size = tuple[int, ...]
Lengths = tuple[float, ...]
ANISOTROPIC = 3.0
"""A spacing is anisotropic where one is larger than the next by this factor, and the axis has as much fewer voxels."""
LEAST_SIDE = 4
"""No axis is shrunk to fewer voxels."""
MOST_LEVELS = 6
MOST_WIDTH = 320
"""Channels of the deepest levels."""
SAME = 0.01
"""Spacings that differ by no more than this share are one."""


@dataclass(frozen=True)
class VolumePlan:
    """spacing: that all volumes are brought to; None: they stay as they are.  unit_spacing: that of the voxels, whichever.

    size: the median of volumes on that grid.  patch: what is trained on; whole: whether it is all of a volume.
    shrink: by what each level after the first divides each axis.  kernels: of the convolutions of each level.
    widths: channels of each level.  schemes: of every channel's intensity, in nnU-Net's words.
    """

    spacing: Lengths | None
    unit_spacing: Lengths
    size: Size
    patch: Size
    whole: bool
    batch: int
    shrink: tuple[Size, ...]
    kernels: tuple[Size, ...]
    widths: tuple[int, ...]
    schemes: tuple[str, ...]


def common_spacing(spacings: Sequence[Lengths], sizes: Sequence[Size]) -> Lengths | None:
    """The spacing to bring volumes to: the median along each axis; None where they have one already.

    Where the median is anisotropic, the tenth percentile along the coarse axis, so that few volumes lose planes.

    >>> common_spacing([(2.0, 1.0, 1.0), (3.0, 1.0, 0.5), (4.0, 1.0, 1.0)], [(20, 40, 40)] * 3)
    (3.0, 1.0, 1.0)
    """
    if all(max(one) <= min(one) * (1 + SAME) for one in zip(*spacings, strict=True)):
        return None
    median = [statistics.median(one) for one in zip(*spacings, strict=True)]
    voxels = [statistics.median(one) for one in zip(*sizes, strict=True)]
    coarse = median.index(max(median))
    others = [axis for axis in range(len(median)) if axis != coarse]
    is_coarse = median[coarse] > ANISOTROPIC * max(median[axis] for axis in others)
    if is_coarse and voxels[coarse] * ANISOTROPIC < min(voxels[axis] for axis in others):
        tenth = float(np.percentile([one[coarse] for one in spacings], 10))
        median[coarse] = max(tenth, *(median[axis] for axis in others))
    return tuple(float(f"{length:.6g}") for length in median)


def levels_of(size: Size, spacing: Lengths) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """(by what each further level divides each axis, the kernels of each level) of a network for patches of `size`.

    An axis is halved while it keeps LEAST_SIDE voxels and its voxels are less than twice as long as the shortest of those that
    can be halved; its kernels are 1 until its voxels are less than twice as long as the shortest, and 3 from there on.

    >>> levels_of((16, 64, 64), (3.0, 1.0, 1.0))
    (((1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)), ((1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)))
    """
    sides, lengths = list(size), list(spacing)
    shrink: list[Size] = []
    kernel, kernels = [1] * len(size), []
    while True:
        kernel = [3 if old == 3 or one < 2 * min(lengths) else 1 for old, one in zip(kernel, lengths, strict=True)]
        kernels.append(tuple(kernel))
        able = [axis for axis, side in enumerate(sides) if side >= 2 * LEAST_SIDE]
        if not able or len(shrink) == MOST_LEVELS - 1:
            return tuple(shrink), tuple(kernels)
        shortest = min(lengths[axis] for axis in able)
        by = tuple(2 if axis in able and lengths[axis] < 2 * shortest else 1 for axis in range(len(sides)))
        shrink.append(by)
        sides = [math.ceil(side / factor) for side, factor in zip(sides, by, strict=True)]
        lengths = [length * factor for length, factor in zip(lengths, by, strict=True)]


def patch_of(size: Size, spacing: Lengths, voxels: int) -> Size:
    """A patch of no more than `voxels`, as long along each axis in mm as volumes of `size` allow.

    >>> patch_of((20, 100, 100), (2.0, 1.0, 1.0), 20_000)
    (16, 32, 32)
    """
    low, high = 0.0, max(side * length for side, length in zip(size, spacing, strict=True))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(_sides(size, spacing, middle)) <= voxels else (low, middle)
    sides = _sides(size, spacing, low)
    shrink, _ = levels_of(sides, spacing)
    factors = [math.prod(one) for one in zip(*shrink, strict=True)] if shrink else [1] * len(sides)
    return tuple(side // by * by if side > by else side for side, by in zip(sides, factors, strict=True))


def _sides(size: Size, spacing: Lengths, millimetres: float) -> Size:
    return tuple(max(1, min(side, int(millimetres / length))) for side, length in zip(size, spacing, strict=True))


def widths_of(first: int, levels: int) -> tuple[int, ...]:
    """Channels that double from level to level, up to MOST_WIDTH."""
    return tuple(min(MOST_WIDTH, first << level) for level in range(levels))
