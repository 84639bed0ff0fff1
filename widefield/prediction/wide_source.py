"""The pixels that a network gets of an image that is read by window: of one file, or of one per channel, on the run's grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from widefield.data import Dataset
from widefield.data.image import read_image
from widefield.data.spatial.resampling import GridMap
from widefield.data.windowed_files import size_of
from widefield.geometry.box import Box
from widefield.image_files import ImageFile, open_image
from widefield.image_files.info import spacing_in_mm


@dataclass(frozen=True)
class WideSource:
    """files: one, or one per channel.  map: from the pixels of the files to those that the network gets."""

    files: tuple[Path, ...]
    channels: int
    dtype: torch.dtype
    map: GridMap

    @classmethod
    def of(cls, image: ImageFile, files: Sequence[Path], dataset: Dataset) -> WideSource:
        """image: the first file, opened.  ValueError: files that do not fit each other, or no spacing where the run has one."""
        size = size_of(image)
        for file in files[1:]:
            with open_image(file) as other:
                if size_of(other) != size or other.info.channels != 1:
                    raise ValueError(
                        f"{file} is {' x '.join(map(str, other.info.shape))} and {image.path}, of the same case, is "
                        f"{' x '.join(map(str, image.info.shape))} (channels first); mend one of them"
                    )
        return cls(tuple(files), dataset.channels, dataset.dtype, grid_of(image, dataset))

    @property
    def size(self) -> tuple[int, ...]:
        """Of the image as the network gets it."""
        return self.map.output

    def as_stored(self) -> WideSource:
        """On the files' own grid."""
        return replace(self, map=GridMap(self.map.source, self.map.source))

    def read(self, window: Box) -> Tensor:
        """The pixels (C, *window) of a window of that image, in the run's dtype."""
        box = window if self.map.is_identity else self.map.source_box(window)
        each = self.channels if len(self.files) == 1 else 1
        parts = [read_image(file, each, self.dtype, window=box, dims=len(box)) for file in self.files]
        part = torch.cat(parts) if len(parts) > 1 else parts[0]
        return part if self.map.is_identity else self.map.pixels(part, box, window)


def grid_of(image: ImageFile, dataset: Dataset) -> GridMap:
    """The map from an image's grid to the run's.  ValueError: the run has a spacing, and the image tells none."""
    size = size_of(image)
    if dataset.resampling is None:
        return GridMap(size, size)
    spacing = _millimetres(image)
    if len(spacing) != len(size) or not all(length > 0 for length in spacing):
        raise ValueError(
            f"{image.path} tells no spacing, and this run brings images to a spacing of "
            f"{dataset.resampling.in_words()}; save it in a format that tells it, as NIfTI"
        )
    dataset.resampling.check(spacing, str(image.path))
    return dataset.resampling.map_of(size, spacing)


def _millimetres(image: ImageFile) -> tuple[float, ...]:
    """ValueError: the image tells its spacing in no unit of length."""
    try:
        return spacing_in_mm(image.info)
    except ValueError as error:
        raise ValueError(f"{image.path}: {error}") from None
