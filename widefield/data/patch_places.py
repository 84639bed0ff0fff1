"""Where do the patches of an image lie in an epoch?  Everywhere by a cover of it, or where they are drawn.

A place depends on the seed, the epoch, the image and the patch's number alone, so that any rank and worker finds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from widefield.data import WindowedImages
from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.balanced_crops import BalancedCrops
from widefield.data.sources import OfImages
from widefield.data.spatial.class_pixels import ClassPixels
from widefield.data.tissue import Tissue
from widefield.data.transforms import seed_of
from widefield.geometry.box import Box
from widefield.geometry.cover import num_windows, shifts, window_at
from widefield.geometry.interval import Interval


class Places(Protocol):
    """The patches of all images of a split, each of `side` pixels."""

    @property
    def side(self) -> tuple[int, ...]: ...

    @property
    def counts(self) -> Sequence[int]:
        """The patches of each image, in every epoch."""

    def box(self, image: int, number: int, epoch: int) -> Box:
        """The pixels of patch `number` of an image, which may reach beyond it."""


@dataclass(frozen=True)
class CoverPlaces:
    """Each pixel of every image once an epoch.  sizes: of the images.  seed: of the shifts; None: the first window is at 0.

    tissue: of the images; only windows in which there is some, on a grid that stays where it is, since their number must.
    """

    sizes: Sequence[tuple[int, ...]]
    side: tuple[int, ...]
    seed: int | None = None
    tissue: Sequence[Tissue] | None = None

    @cached_property
    def counts(self) -> list[int]:
        if self.tissue is not None:
            return [len(numbers) for numbers in self._kept]
        return [math.prod(self._grid(size)) for size in self.sizes]

    def box(self, image: int, number: int, epoch: int) -> Box:
        size = self.sizes[image]
        if self.tissue is not None:
            return self._window(size, self._kept[image][number], [0] * len(size))
        return self._window(size, number, self._shift(image, epoch))

    @property
    def _is_shifted(self) -> bool:
        return self.seed is not None and self.tissue is None

    def _grid(self, size: tuple[int, ...]) -> list[int]:
        return [num_windows(extent, side, shifted=self._is_shifted) for extent, side in zip(size, self.side, strict=True)]

    def _shift(self, image: int, epoch: int) -> list[int]:
        size = self.sizes[image]
        if not self._is_shifted:
            return [0] * len(size)
        generator = np.random.default_rng(seed_of(self.seed or 0, "cover", epoch, image))
        possible = [shifts(extent, side) for extent, side in zip(size, self.side, strict=True)]
        return [int(generator.integers(run.start, run.stop)) for run in possible]

    def _window(self, size: tuple[int, ...], number: int, shift: Sequence[int]) -> Box:
        at = np.unravel_index(number, self._grid(size))
        return tuple(window_at(int(place), side, by) for place, side, by in zip(at, self.side, shift, strict=True))

    @cached_property
    def _kept(self) -> list[list[int]]:
        """The numbers of the windows with tissue, by image."""
        assert self.tissue is not None
        return [
            [n for n in range(math.prod(self._grid(size))) if tissue.is_in(self._window(size, n, [0] * len(size)))]
            for size, tissue in zip(self.sizes, self.tissue, strict=True)
        ]


@dataclass(frozen=True)
class RandomPlaces:
    """`per_image` patches of every image, each anywhere in it, or centred on a pixel of its foreground.

    crop: the patch, with the share that is centred, and the classes.  known: where images have which class, by their number.
    tissue: of the images; patches are then centred on a pixel of it, and not anywhere.
    """

    images: WindowedImages
    sizes: Sequence[tuple[int, ...]]
    crop: ClassBalancedCrop
    per_image: int
    seed: int
    num_classes: int
    known: Mapping[int, ClassPixels] = field(default_factory=dict)
    tissue: Sequence[Tissue] | None = None

    @property
    def side(self) -> tuple[int, ...]:
        return self.crop.sides(len(self.sizes[0]))

    @cached_property
    def counts(self) -> list[int]:
        """None of a slide without tissue."""
        if self.tissue is None:
            return [self.per_image] * len(self.sizes)
        return [self.per_image if one.mask.any() else 0 for one in self.tissue]

    @cached_property
    def _crops(self) -> BalancedCrops:
        return BalancedCrops(self.num_classes, self.known)

    def box(self, image: int, number: int, epoch: int) -> Box:
        seed, size = seed_of(self.seed, "patch", epoch, image, number), self.sizes[image]
        source = OfImages(self.images, image, seed=seed, check=lambda *sample: None)
        anywhere = None if self.tissue is None else self.tissue[image].draw
        corner = self._crops.corner(self.crop, source, seed, extents=size, moved=_itself, index=image, anywhere=anywhere)
        return tuple(Interval(start, start + side) for start, side in zip(corner, self.side, strict=True))


def _itself(pixel: tuple[int, ...]) -> tuple[int, ...]:
    return pixel
