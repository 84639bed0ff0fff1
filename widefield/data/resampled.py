"""Images brought to one spacing as they are read, by window: pixels interpolated, labels by the nearest pixel.

All further transforms of volumes (flips, crops) copy voxels, so a voxel is interpolated once.  Statistics, training, metrics
and predictions see the resampled images alone; so lengths that metrics give are those of the resampled grid's voxels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from widefield.data import Dataset, Images, WindowedImages, spacing_of
from widefield.data.spatial.resampling import GridMap, Resampling, made
from widefield.geometry import Interval
from widefield.geometry.box import full_box


@dataclass(frozen=True)
class ResampledImages:
    """One split; see data.WindowedImages.  Every image tells its spacing."""

    images: WindowedImages
    resampling: Resampling

    def __len__(self) -> int:
        return len(self.images)

    def name_of(self, index: int) -> str:
        return self.images.name_of(index)

    def group_of(self, index: int) -> Any:
        of = getattr(self.images, "group_of", None)
        return None if of is None else of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.images.shape(index)[0], *self._map(index).output)

    def spacing_of(self, index: int) -> tuple[float, ...]:
        return self.resampling.spacing_of(self.images.shape(index)[1:], self._spacing(index))

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return self.read_window(index, full_box(self._map(index).output))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        map = self._map(index)
        box = map.source_box(window)
        image, target = self.images.read_window(index, box)
        return map.pixels(image, box, window), self._moved(map, target, box, window)

    def target_of(self, index: int) -> int | Tensor:
        of = getattr(self.images, "target_of", None)
        if of is None:
            return self.read(index)[1]
        map = self._map(index)
        return self._moved(map, of(index), full_box(map.source), full_box(map.output))

    def _moved(self, map: GridMap, target: int | Tensor, box: tuple[Interval, ...], window: tuple[Interval, ...]) -> Any:
        """Labels of pixels on the new grid; those of an image as they are."""
        if not isinstance(target, Tensor) or target.ndim < len(window):
            return target
        return map.labels(target, box, window)

    def _map(self, index: int) -> GridMap:
        return self.resampling.map_of(self.images.shape(index)[1:], self._spacing(index))

    def _spacing(self, index: int) -> tuple[float, ...]:
        return told_spacing(self.images, index)


@dataclass(frozen=True)
class WeightedResampledImages(ResampledImages):
    """Of images that all have a weight."""

    def weight_of(self, index: int) -> float:
        return self.images.weight_of(index)  # type: ignore[attr-defined]


def told_spacing(images: Images, index: int) -> tuple[float, ...]:
    """The spacing of an image, in mm.  ValueError: it tells none, or in no unit of length."""
    found = spacing_of(images, index)
    if found is None or not all(0 < length < 1e9 for length in found):
        raise ValueError(
            f"{images.name_of(index)} tells no spacing{'' if found is None else f' but {list(found)}'}, and "
            "data.options.spacing resamples images to a common one; save it in a format that tells it, as NIfTI, or leave "
            "data.options.spacing out"
        )
    return found


def with_spacing(dataset: Dataset, spacing: Any, order: Any) -> Dataset:
    """The dataset on a common grid.

    spacing: a length per dim in mm, or "median", of all images along each dim, those to evaluate among them, so that folds
        share a grid.  order: of interpolation, linear or cubic (Keys 1981 with a = -0.75, as torch's bicubic one).
    ValueError, which names the file: an image tells no spacing, or has other dims than the spacing.
    """
    splits = (dataset.train, dataset.evaluate)
    found = [told_spacing(images, index) for images in splits for index in range(len(images))]
    if spacing == "median":
        spacing = median_of(found)
    resampling = made(spacing, order)
    lengths, names = len(resampling.spacing), (images.name_of(index) for images in splits for index in range(len(images)))
    for one, name in zip(found, names, strict=True):
        if len(one) == lengths == dataset.dims:
            resampling.check(one, name)
    if len(resampling.spacing) != dataset.dims:
        raise ValueError(
            f"data.options.spacing is {list(resampling.spacing)} and images have {dataset.dims} dims; give one length per dim"
        )
    train, evaluate = (_resampled(images, resampling) for images in splits)
    about = f"{dataset.about or 'images'}, resampled to a spacing of {resampling.in_words()} ({resampling.order})"
    return replace(dataset, train=train, evaluate=evaluate, resampling=resampling, about=about)


def median_of(spacings: Sequence[Sequence[float]]) -> list[float]:
    """Along each dim."""
    return [statistics.median(lengths) for lengths in zip(*spacings, strict=True)]


def _resampled(images: Images, resampling: Resampling) -> Images:
    assert isinstance(images, WindowedImages)
    kind = WeightedResampledImages if hasattr(images, "weight_of") else ResampledImages
    return kind(images, resampling)
