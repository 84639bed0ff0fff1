"""Probabilities of classes in a file of bands, as `widefield predict` writes them of large images: read as an array is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from widefield.geometry import Interval
from widefield.image_files import ImageFile
from widefield.image_files.band_image import STEPS
from widefield.image_files.image_file import Array


@dataclass(frozen=True)
class BandProbabilities:
    """file: of float32, or of uint16 in steps.  It is indexed as an array (classes, depth, height, width), by slices."""

    file: ImageFile

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.file.info.channels, *(1, *self.file.info.size)[-3:])

    def __len__(self) -> int:
        return self.file.info.channels

    def __getitem__(self, index: Sequence[slice]) -> Array:
        """index: a slice of the classes, and one with a start and a stop of each dim.  No probability is shown as 0."""
        classes, *box = index
        dims = len(self.file.info.size)
        found = self.file.read([Interval(one.start, one.stop) for one in box][-dims:])
        found = found.reshape(len(found), *(one.stop - one.start for one in box))[classes]
        if found.dtype.kind == "f":  # of a NIfTI of steps too, which stand for 0 to 1, and no probability for one step more
            return np.where(found > 1 + 0.5 / STEPS, 0, np.nan_to_num(found, nan=0.0)).astype(found.dtype)
        return np.where(found > STEPS, 0, found / np.float32(STEPS)).astype(np.float32)
