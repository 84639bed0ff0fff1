"""The patches of a split of large images, as a split of images of one size: which of them an epoch has depends on the epoch.

A patch is read by window: its own pixels, and not those of its image.  What it shows beyond the image are pixels of 0 with the
label of pixels that do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from widefield.data import WindowedImages
from widefield.data.patch_places import Places
from widefield.geometry.box import Box, full_box, is_empty, meet, size_of, within
from widefield.geometry.interval import Interval

_OF_THE_IMAGE = ("weight_of", "group_of", "spacing_of", "target_of")


class PatchImages:
    """See the top; as data.WindowedImages, and `of_epoch`.

    What else is known of a patch is what its image says: its weight, group and spacing, and the label of a whole image.
    """

    def __init__(
        self, images: WindowedImages, places: Places, *, pixels: bool, ignore: int | None = None, epoch: int = 0
    ) -> None:
        """pixels: whether pixels have labels.  ignore: the label of those that do not count, which a cover may need."""
        self.images, self.places, self.pixels, self.ignore, self.epoch = images, places, pixels, ignore, epoch
        self._stops = list(accumulate(places.counts))

    def of_epoch(self, epoch: int) -> PatchImages:
        """The same patches at their places in another epoch."""
        other = copy(self)
        other.epoch = epoch
        return other

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getattr__(self, name: str) -> Callable[[int], Any]:
        if name not in _OF_THE_IMAGE or (name == "target_of" and self.pixels):
            raise AttributeError(name)
        of = getattr(self.images, name)
        return lambda index: of(self.place_of(index)[0])

    def place_of(self, index: int) -> tuple[int, int]:
        """The image that a patch is of, and its number there."""
        image = bisect_right(self._stops, index)
        return image, index - (self._stops[image - 1] if image else 0)

    def box_of(self, index: int) -> Box:
        """The pixels of the image that a patch shows; it may reach beyond the image."""
        image, number = self.place_of(index)
        return self.places.box(image, number, self.epoch)

    def name_of(self, index: int) -> str:
        image, number = self.place_of(index)
        return f"{self.images.name_of(image)}, patch {number}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.images.shape(self.place_of(index)[0])[0], *self.places.side)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return self.read_window(index, full_box(self.places.side))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        """A part of a patch.  ValueError: it shows what is beyond the image, and no label is there for that."""
        image, whole = self.place_of(index)[0], self.box_of(index)
        box = tuple(Interval(run.start + part.start, run.start + part.stop) for run, part in zip(whole, window, strict=True))
        inside = meet(box, full_box(self.images.shape(image)[1:]))
        if is_empty(inside):  # of one pixel, the channels, the dtype and the kind of labels
            pixels, target = self.images.read_window(image, tuple(Interval(0, 1) for _ in box))
            nothing = tuple(Interval(run.start, run.start) for run in box)
            of_none = (..., *[slice(0, 0)] * len(box))
            return self._beyond(pixels[of_none], target[of_none] if self.pixels else target, box, nothing)  # type: ignore[index]
        pixels, target = self.images.read_window(image, inside)
        return (pixels, target) if inside == box else self._beyond(pixels, target, box, inside)

    def _beyond(self, pixels: Tensor, target: int | Tensor, box: Box, inside: Box) -> tuple[Tensor, int | Tensor]:
        """The image and the labels of `inside` as those of `box`, around which nothing is."""
        image = pixels.new_zeros(len(pixels), *size_of(box))
        image[..., *within(box, inside)] = pixels
        if isinstance(target, int) or not self.pixels:
            return image, target
        assert self.ignore is not None, "training/patches.py refuses patches beyond an image where no label is for that"
        dtype = target.dtype if self.ignore >= 0 or target.dtype != torch.uint8 else torch.int64
        marks = torch.full((*target.shape[: target.ndim - len(box)], *size_of(box)), self.ignore, dtype=dtype)
        marks[..., *within(box, inside)] = target.to(dtype)
        return image, marks
