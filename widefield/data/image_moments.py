"""Images of which mean and standard deviation are taken as they are read, for `data.intensity=image`: each is read once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from widefield.data import Images, WindowedImages
from widefield.data.intensity import Area, moments_of
from widefield.data.targets import part_of
from widefield.geometry import Interval
from widefield.geometry.box import slices

MOST_KEPT = 65536
"""Images whose moments a process keeps: about half a kilobyte each, 16 bytes of it per channel."""


class MeasuredImages:
    """Images that know the moments of what they read last.  Other attributes are those of `images`."""

    def __init__(self, images: Images, area: Area) -> None:
        self._images, self._area = images, area
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._images)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while a worker process unpickles this, there is no `_images` yet
            raise AttributeError(name)
        return getattr(self._images, name)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        """As `images` read it.  A dataset of random images has other moments each time, so those of the last time are kept."""
        image, target = self._images.read(index)
        self._kept.pop(index, None)
        if len(self._kept) >= MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[index] = moments_of(image, self._area)
        return image, target

    def name_of(self, index: int) -> str:
        return self._images.name_of(index)

    def moments(self, index: int) -> Tensor:
        """(C, 2) mean and deviation of an image that was just read."""
        return self._kept[index]


class MeasuredWindows(MeasuredImages):
    """Images of which windows are read.  The first window of an image is cut from the whole, which its moments need."""

    _images: WindowedImages

    def shape(self, index: int) -> tuple[int, ...]:
        return self._images.shape(index)

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        """As `images` read it."""
        if index in self._kept:
            return self._images.read_window(index, window)
        image, target = self.read(index)
        return image[..., *slices(window)].clone(), part_of(target, window)


def measured(images: Images, area: Area) -> MeasuredImages:
    """The images with their moments; windows are read where `images` reads them."""
    return MeasuredWindows(images, area) if isinstance(images, WindowedImages) else MeasuredImages(images, area)
