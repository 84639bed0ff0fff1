"""An image with labels of pixels, of which boxes are read: in memory, or of a dataset whose format may read windows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from widefield.data import Images, WindowedImages
from widefield.data.transforms import all_seeded
from widefield.geometry.box import Box, enlarged, full_box, slices


class Source(Protocol):
    """An image (C, *size) with its labels, (*size) or (K, *size), or with another image, (K, *scale times the size)."""

    @property
    def size(self) -> tuple[int, ...]: ...

    def read(self, box: Box) -> tuple[Tensor, Tensor]:
        """The image and the labels of a box."""

    def labels(self, box: Box) -> Tensor:
        """The labels alone."""


@dataclass(frozen=True)
class InMemory:
    """A whole image with its labels.  scale: how many pixels of these a pixel is, along each dim."""

    image: Tensor
    marks: Tensor
    scale: int = 1

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.image.shape[1:])

    def read(self, box: Box) -> tuple[Tensor, Tensor]:
        return self.image[..., *slices(box)], self.labels(box)

    def labels(self, box: Box) -> Tensor:
        return self.marks[..., *slices(enlarged(box, self.scale))]


class OfImages:
    """Image `index` of a split.  Where the format has no windows, the whole is read once and boxes are cut from it.

    check: called with each image and target that is read, to refuse wrong labels.  seed: of a dataset that uses random numbers.
    scale: of a target image.
    """

    def __init__(self, images: Images, index: int, *, seed: int, check: Callable[[Tensor, Any], None], scale: int = 1) -> None:
        self._images, self._index, self._seed, self._check, self._scale = images, index, seed, check, scale
        self._whole: InMemory | None = None
        self._marks: Tensor | None = None

    @property
    def size(self) -> tuple[int, ...]:
        if isinstance(self._images, WindowedImages):
            return tuple(self._images.shape(self._index)[1:])
        return self._read_whole().size

    def read(self, box: Box) -> tuple[Tensor, Tensor]:
        if self._whole is None and isinstance(self._images, WindowedImages):
            image, target = self._images.read_window(self._index, box)
            self._check(image, target)
            return image, target  # type: ignore[return-value]
        return self._read_whole().read(box)

    def sample(self) -> tuple[Tensor, Any]:
        """The whole image and its target."""
        whole = self._read_whole()
        return whole.image, whole.marks

    def labels(self, box: Box) -> Tensor:
        labels_in = getattr(self._images, "labels_in", None)
        if labels_in is not None and self._whole is None:
            found = labels_in(self._index, box)
            if found is not None:
                return found
        target_of = getattr(self._images, "target_of", None)
        if target_of is None or self._whole is not None:
            return self.read(box)[1]
        if self._marks is None:
            self._marks = target_of(self._index)
        return self._marks[..., *slices(enlarged(box, self._scale))]

    def _read_whole(self) -> InMemory:
        if self._whole is None:
            image, target = read_seeded(self._images, self._index, self._seed)
            self._check(image, target)
            self._whole = InMemory(image, target, self._scale)  # type: ignore[arg-type]
        return self._whole


def read_seeded(images: Images, index: int, seed: int) -> tuple[Tensor, int | Tensor]:
    """The image and its target; the generators are seeded where the dataset uses random numbers, as a user's own may."""
    with all_seeded(seed) if getattr(images, "is_random", False) else nullcontext():
        return images.read(index)


def everything(source: Source) -> Box:
    """The box of all pixels of a source."""
    return full_box(source.size)
