"""Numbers of several bands that are to be written beside the image they belong to, as the probabilities of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from widefield.geometry.box import Box
from widefield.image_files.image_file import Array
from widefield.image_files.info import ImageInfo
from widefield.image_files.label_image import OnImage, read_smaller

STEPS = 65534
"""Of probabilities in 16 bits: the number of a probability of 1; the next one stands for none."""
ReadBand = Callable[[int, Box], Array]
"""From the number of a band and a box of the spatial dims, the numbers in it."""


@dataclass(frozen=True)
class BandImage(OnImage):
    """source, like: the image, and what its file says.  names: of the bands.  dtype: float32, or uint16 for steps of `scale`.

    nodata: the number of pixels without an answer.  notes: what else is to be known of it, as how it was made.
    """

    source: Path
    like: ImageInfo
    dtype: str
    names: tuple[str, ...]
    nodata: float
    scale: float = 1.0
    notes: Mapping[str, str] = field(default_factory=dict)

    def read_at(self, read: ReadBand, band: int, box: Box, step: int) -> Array:
        """The numbers of a box of a smaller level: the mean of those that each pixel covers."""
        return read_smaller(partial(read, band), self, box, step, halve=partial(averaged, nodata=self.nodata))


def averaged(values: Array, *, nodata: float) -> Array:
    """Numbers (..., H, W) at half the resolution: the mean of 2 x 2 pixels that are not nodata; an odd last one counts alone.

    >>> averaged(np.array([[1, 3, 5], [9, 9, 7]], np.uint16), nodata=9).tolist()
    [[2, 6]]
    """
    height, width = values.shape[-2:]
    odd = [(0, 0)] * (values.ndim - 2) + [(0, height % 2), (0, width % 2)]
    values = np.pad(values, odd, mode="edge")
    four = np.stack([values[..., row::2, column::2] for row in (0, 1) for column in (0, 1)])
    empty = np.isnan(four) if math.isnan(nodata) else four == nodata
    counts = (~empty).sum(axis=0)
    mean = np.where(empty, 0, four).sum(axis=0, dtype=np.float64) / np.maximum(counts, 1)
    if values.dtype.kind in "iu":
        mean = np.rint(mean)
    return np.where(counts > 0, mean, nodata).astype(values.dtype)
