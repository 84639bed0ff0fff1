"""Arrays that libraries read by slices: which of their dims are channels, which are space, and what a chunk costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from widefield.geometry.box import Box

Array = np.ndarray[Any, Any]
MOST_CHANNELS = 4
MOST_CHUNK_BYTES = 64 << 20
"""A window costs at least the chunks that it lies in; above this, an image is not read by window."""


@dataclass(frozen=True)
class ArrayDims:
    """axes: "YX" or "ZYX".  space: the stored dim of each axis.  channel: that of the channels; None: there is one channel.

    A dim that is none of these has one pixel.
    """

    axes: str
    space: tuple[int, ...]
    channel: int | None = None

    def size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a stored shape, or of a chunk's: the extents of the axes.

        >>> ArrayDims("YX", (1, 0), channel=2).size((50, 37, 3)), ArrayDims("YX", (1, 0), channel=2).channels((50, 37, 3))
        ((37, 50), 3)
        """
        return tuple(int(shape[dim]) for dim in self.space)

    def channels(self, shape: Sequence[int]) -> int:
        return 1 if self.channel is None else int(shape[self.channel])

    def slices(self, ndim: int, box: Box) -> tuple[slice, ...]:
        """The index that takes a box, and all channels, from the stored array; no dim is lost."""
        index = [slice(0, 1)] * ndim
        if self.channel is not None:
            index[self.channel] = slice(None)
        for dim, interval in zip(self.space, box, strict=True):
            index[dim] = slice(interval.start, interval.stop)
        return tuple(index)

    def read(self, array: Any, box: Box) -> Array:
        """(C, *the box's size), of anything that has a shape and gives NumPy arrays for slices."""
        part = np.asarray(array[self.slices(len(array.shape), box)])
        kept = ([] if self.channel is None else [self.channel]) + list(self.space)
        part = part.transpose(*kept, *(dim for dim in range(part.ndim) if dim not in kept))
        part = part.reshape(part.shape[: len(kept)])
        return part[None] if self.channel is None else part


def dims_by_extents(shape: Sequence[int]) -> ArrayDims:
    """Of (H, W), (D, H, W), (C, H, W), (H, W, C) or (C, D, H, W), where nothing names the dims.

    Of three dims, the first is channels where it is at most 4 and the last is longer, the last where it is at most 4.
    ValueError: another number of dims.

    >>> [dims_by_extents(shape).channel for shape in ((37, 50), (3, 37, 50), (37, 50, 3), (9, 37, 50), (1, 9, 37, 50))]
    [None, 0, 2, None, 0]
    """
    if len(shape) == 2:
        return ArrayDims("YX", (0, 1))
    if len(shape) == 4:
        return ArrayDims("ZYX", (1, 2, 3), channel=0)
    if len(shape) != 3:
        raise ValueError(
            f"an array of shape {tuple(shape)} is no image; save (H, W), (C, H, W), (H, W, C), (D, H, W) or (C, D, H, W)"
        )
    if shape[0] <= MOST_CHANNELS < shape[2]:
        return ArrayDims("YX", (1, 2), channel=0)
    return ArrayDims("YX", (0, 1), channel=2) if shape[2] <= MOST_CHANNELS else ArrayDims("ZYX", (0, 1, 2))


def dims_by_names(names: Sequence[str], shape: Sequence[int], *, keep_z: bool = False) -> ArrayDims:
    """Of dims that are named c, z, y and x, in any order and either case; others, as t, are left out where they have one pixel.

    keep_z: whether a z of one pixel makes a volume.  ValueError: no x or y, a name twice, or others with more pixels.

    >>> dims_by_names("TCZYX", (1, 3, 1, 37, 50))
    ArrayDims(axes='YX', space=(3, 4), channel=1)
    """
    at = {name.lower(): dim for dim, name in enumerate(names)}
    if len(at) != len(shape) or not {"y", "x"} <= set(at):
        raise ValueError(f"the dims {', '.join(names) or 'without names'} of shape {tuple(shape)} are to have one x and one y")
    more = [f"{name} has {shape[dim]}" for name, dim in at.items() if name not in ("c", "z", "y", "x") and shape[dim] != 1]
    if more:
        raise ValueError(
            f"of the dims {', '.join(names)}, {' and '.join(more)}; only c, z, y and x may have more than 1: save one image "
            f"per {more[0].split()[0]}"
        )
    has_z = "z" in at and (keep_z or shape[at["z"]] != 1)
    axes = "zyx" if has_z else "yx"
    return ArrayDims(axes.upper(), tuple(at[axis] for axis in axes), at.get("c"))


def check_numbers(dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """ValueError: values that are no numbers of at most 8 bytes, or none at all."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or 0 in shape:
        raise ValueError(f"an array of {dtype} of shape {tuple(shape)} is no image; save numbers")


def advice_on_chunks(nbytes: int) -> str:
    """What to do where a chunk is too large for reading by window; "" where it is not."""
    if nbytes <= MOST_CHUNK_BYTES:
        return ""
    return f"one chunk holds {nbytes >> 20} MiB, which every window decodes; write it again with chunks of 1 to 16 MiB"


def rescaled_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Of pixels that a slope and an intercept change: float32 where it holds every stored number, float64 otherwise.

    >>> rescaled_dtype(np.dtype("int16")), rescaled_dtype(np.dtype("int32"))
    (dtype('float32'), dtype('float64'))
    """
    return np.result_type(stored, np.float32)


def rescaled(pixels: Array, slope: float, intercept: float, dtype: np.dtype[Any]) -> Array:
    """pixels * slope + intercept, in float64, rounded once."""
    return (pixels * np.float64(slope) + np.float64(intercept)).astype(dtype)
