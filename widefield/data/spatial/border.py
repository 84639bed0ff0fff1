"""What lies outside of an image: which of its pixels are shown there, and with which label."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from widefield.geometry.interval import Interval

Array = np.ndarray[Any, Any]
Border = Literal["constant", "edge", "reflect", "symmetric"]
BORDERS: tuple[Border, ...] = ("constant", "edge", "reflect", "symmetric")


def folded(at: Array, extent: int, border: Border) -> Array:
    """Positions within the image that are shown at positions outside of it."""
    last = extent - 1
    if border in ("constant", "edge") or extent == 1:
        return np.clip(at, 0, last)
    if border == "reflect":
        around = np.mod(at, 2 * last)
        return np.where(around > last, 2 * last - around, around)
    around = np.mod(at + 0.5, 2 * extent)
    return np.clip(np.where(around > extent, 2 * extent - around, around) - 0.5, 0, last)


def pixels_shown(low: float, high: float, extent: int, border: Border) -> Interval:
    """The pixels of the image that show the positions from `low` to `high`, of which some may be outside; at least one."""
    if border in ("constant", "edge") or (low >= 0 and high <= extent - 1):
        return Interval(int(np.clip(low, 0, extent - 1)), int(np.clip(high, 0, extent - 1)) + 1)
    if high - low >= 2 * extent:
        return Interval(0, extent)
    shown = folded(np.arange(low, high + 1), extent, border)
    return Interval(int(shown.min()), int(shown.max()) + 1)


def selected(planes: Tensor, places: Array, dim: int) -> Tensor:
    """The pixels at these places of a dim: a view or a flip where they run in a row."""
    count, steps = len(places), np.diff(places)
    if count and (steps == 1).all():
        return planes.narrow(dim, int(places[0]), count)
    if count and (steps == -1).all():
        return planes.narrow(dim, int(places[-1]), count).flip(dim)
    return planes.index_select(dim, torch.from_numpy(places))


def label_outside(far: Tensor | None, labels: Tensor, dims: int) -> int:
    """The label of what is outside of the image for a task without a label that does not count.

    far: where a window shows what is outside; None: nowhere.  labels: (*pixels), or (K, *pixels), where it is 0.
    ValueError: there is none.
    """
    if far is not None and labels.ndim == dims:
        raise ValueError(
            f"{int(far.sum())} of {far.numel()} pixels are outside of the image, and the task has no label for pixels that "
            "do not count; give the task an attribute ignore_index, or leave out what moves pixels in from outside"
        )
    return 0


def with_label(labels: Tensor, label: int) -> Tensor:
    """The labels with a dtype that `label` fits."""
    limits = torch.iinfo(labels.dtype)
    return labels if limits.min <= label <= limits.max else labels.long()


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As a dtype, rounded to the nearest whole number, and to its range, where that is one of integers."""
    if dtype.is_floating_point or values.dtype == dtype:
        return values.to(dtype)
    limits = torch.iinfo(dtype)
    return values.round().clamp(limits.min, limits.max).to(dtype)
