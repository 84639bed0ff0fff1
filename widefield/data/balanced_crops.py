"""Where are the crops that are centred on a pixel of a drawn class?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.sources import Source
from widefield.data.spatial.class_pixels import ClassPixels, class_pixels_of

_KEEP_INDEXED = 4096
"""Images whose class pixels are remembered, some kilobytes each."""


class BalancedCrops:
    """Draws them, and remembers the class pixels of images by their number."""

    def __init__(self, num_classes: int, known: Mapping[int, ClassPixels] | None = None) -> None:
        """known: the class pixels of images, by their number, that are known already."""
        self._num_classes = num_classes
        self._known: dict[int, ClassPixels] = dict(known or {})

    def corner(
        self,
        crop: ClassBalancedCrop,
        source: Source,
        seed: int,
        *,
        extents: Sequence[int],
        moved: Callable[[tuple[int, ...]], Sequence[float]],
        index: int | None = None,
        anywhere: Callable[[np.random.Generator], tuple[int, ...]] | None = None,
    ) -> list[int]:
        """The first pixel of a crop along each dim of an image of `extents`, which is the source after the moves so far.

        moved: where a pixel of the source is in that image.  index: of the source in its split, under which it is remembered.
        anywhere: draws the middle of crops that no class is drawn for; None: they are anywhere in the image.
        """
        generator = np.random.default_rng(seed)
        pixel = None
        if generator.random() < crop.share:
            pixel = self._pixels(source, index).draw(crop.classes, source.labels, generator)
        if pixel is None and anywhere is not None:
            pixel = anywhere(generator)
        center, corner = None if pixel is None else moved(pixel), []
        for axis, (side, extent) in enumerate(zip(crop.sides(len(extents)), extents, strict=True)):
            free = int(generator.integers(0, max(0, extent - side) + 1))
            start = free if center is None else int(np.floor(center[axis] + 0.5)) - side // 2
            corner.append(min(max(start, 0), extent - side) if extent >= side else (extent - side) // 2)
        return corner

    def _pixels(self, source: Source, index: int | None) -> ClassPixels:
        if index is not None and index in self._known:
            return self._known[index]
        found = class_pixels_of(source.size, source.labels, num_classes=self._num_classes)
        if index is not None:
            if len(self._known) >= _KEEP_INDEXED:
                self._known.pop(next(iter(self._known)))
            self._known[index] = found
        return found
