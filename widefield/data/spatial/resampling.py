"""An image on a grid of another spacing: which source pixels a window of the output needs, and the window's pixels.

Along an axis of S source and S' output pixels, output pixel q lies at the source position (q + 1/2) S / S' - 1/2: both grids
cover the same length, from edge to edge.  Positions are float64 and absolute, so a pixel has the same bits in every window.
Beyond the outermost pixel centers the outermost pixels are shown.  There is no filter against aliasing, as nnU-Net has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from widefield.data.spatial.border import Array, rounded
from widefield.data.spatial.warp import Interpolation, blended, taps
from widefield.geometry.box import Box
from widefield.geometry.interval import Interval

Order = Literal["linear", "cubic"]
Size = tuple[int, ...]
_AS_WARP: dict[Order, tuple[Interpolation, int, int]] = {"linear": ("bilinear", 0, 1), "cubic": ("bicubic", 1, 2)}
"""What warp.py calls it, and how many pixels before and behind the one below a position are read."""
FAR = 500
"""Spacings that differ by more than this factor are taken for lengths in different units; those of um and mm by 1,000."""
_CLOSE = 1e-6
"""Spacings of one grid differ by no more than this share, the rounding of float32 headers."""


@dataclass(frozen=True)
class GridMap:
    """From the pixels of `source` to those of `output`, one size per axis."""

    source: Size
    output: Size
    order: Order = "linear"

    @property
    def is_identity(self) -> bool:
        return self.source == self.output

    def source_box(self, window: Box) -> Box:
        """The box of source pixels that a window of the output needs, at least one pixel."""
        _, before, behind = _AS_WARP[self.order]
        found = []
        for axis, (run, extent) in enumerate(zip(window, self.source, strict=True)):
            if extent == self.output[axis]:
                first = min(run.start, extent - 1)
                found.append(Interval(first, max(first + 1, run.stop)))
                continue
            first, last = np.floor(self._positions(axis, Interval(run.start, max(run.start + 1, run.stop))))[[0, -1]]
            low, high = np.clip([first - before, last + behind], 0, extent - 1)
            found.append(Interval(int(low), int(high) + 1))
        return tuple(found)

    def pixels(self, part: Tensor, box: Box, window: Box) -> Tensor:
        """The pixels (C, *window) of a window of the output, in the dtype of `part` (C, *box), whose box is `source_box`'s.

        Weights are used in float32, of float64 pixels in float64; whole numbers are rounded.
        """
        kind = _AS_WARP[self.order][0]
        values = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
        for axis, run in enumerate(window):
            dim = axis - len(window)
            if self.source[axis] == self.output[axis]:
                values = values.narrow(dim, run.start - box[axis].start, len(run))
                continue
            places, weights = taps(self._positions(axis, run), Interval(0, self.source[axis]), values.dtype, kind)
            along = [1] * len(window)
            along[axis] = -1
            read = [values.index_select(dim, place - box[axis].start) for place in places]
            values = blended(read, [weight.view(along) for weight in weights])
        return rounded(values, part.dtype).contiguous()

    def labels(self, part: Tensor, box: Box, window: Box) -> Tensor:
        """The labels (..., *window) of the source pixels nearest to those of a window; of two as near, the later one."""
        for axis, run in enumerate(window):
            places = torch.from_numpy(self.nearest(axis, run) - box[axis].start)
            part = part.index_select(axis - len(window), places)
        return part.contiguous()

    def nearest(self, axis: int, run: Interval) -> Array:
        """The source pixels nearest to output pixels, in whole numbers: floor((q + 1/2) S / S')."""
        return (2 * np.arange(run.start, run.stop) + 1) * self.source[axis] // (2 * self.output[axis])

    def _positions(self, axis: int, run: Interval) -> Array:
        at = (2 * np.arange(run.start, run.stop) + 1) * self.source[axis] / (2 * self.output[axis]) - 0.5
        return np.clip(at, 0, self.source[axis] - 1) if self.order == "linear" else at


@dataclass(frozen=True)
class Resampling:
    """The spacing, one length per axis in mm, that all images are brought to."""

    spacing: tuple[float, ...]
    order: Order = "linear"

    def map_of(self, size: Sequence[int], spacing: Sequence[float]) -> GridMap:
        """The map of an image.  Its size becomes the nearest whole number of pixels, so spacings are met to half a pixel."""
        output = tuple(
            extent if abs(own / wanted - 1) <= _CLOSE else max(1, round(extent * own / wanted))
            for extent, own, wanted in zip(size, spacing, self.spacing, strict=True)
        )
        return GridMap(tuple(size), output, self.order)

    def check(self, spacing: Sequence[float], name: str) -> None:
        """ValueError: an image's lengths are so far from these that one of both is in another unit than mm."""
        ratios = [own / wanted for own, wanted in zip(spacing, self.spacing, strict=True)]
        if min(ratios) < 1 / FAR or max(ratios) > FAR:
            raise ValueError(
                f"{name} has a spacing of {' x '.join(f'{length:.6g}' for length in spacing)} mm, and images are brought to "
                f"{self.in_words()} mm, more than {FAR} times as much or less; lengths are in mm: mend "
                "data.options.spacing or the file"
            )

    def spacing_of(self, size: Sequence[int], spacing: Sequence[float]) -> tuple[float, ...]:
        """The lengths that a pixel of the output has: those of the image, over the number of its pixels."""
        map = self.map_of(size, spacing)
        return tuple(own * old / new for own, old, new in zip(spacing, map.source, map.output, strict=True))

    def in_words(self) -> str:
        """As `2.5 x 1 x 1`."""
        return " x ".join(f"{length:.6g}" for length in self.spacing)

    def to_tree(self) -> dict[str, Any]:
        """For JSON; `from_tree` reads it."""
        return {"spacing": list(self.spacing), "order": self.order}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Resampling:
        """ValueError, TypeError, LookupError: it is not what `to_tree` gave."""
        return made(tree["spacing"], tree["order"])


def made(spacing: Any, order: Any) -> Resampling:
    """ValueError: the spacing is no list of lengths, or there is no such order."""
    lengths = isinstance(spacing, list | tuple) and len(spacing) in (2, 3)
    if not lengths or any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < 1e9 for one in spacing):
        raise ValueError(
            f"data.options.spacing is {spacing!r}; the lengths of a pixel along each dim are wanted, as [2.5, 1, 1] for depth, "
            "height and width in mm, or median"
        )
    if order not in _AS_WARP:
        raise ValueError(f"data.options.interpolation is {order!r}; it is linear or cubic")
    return Resampling(tuple(float(one) for one in spacing), order)
