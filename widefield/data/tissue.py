"""What of a slide counts: its tissue, and not the glass around it, as a mask of low resolution.

By file: `MASKS/STEM.png`, of any size that is no larger than the slide, and of its shape; what is not 0 is tissue.
By Otsu's threshold of saturation (N. Otsu, IEEE Trans. SMC 9(1), 1979), of a slide of 8-bit colours at a low resolution: glass
is grey and tissue is stained.  A pixel of the slide counts as the pixel of the mask does that it lies in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.data import WindowedImages
from widefield.data.masks import SUFFIXES, raw_mask
from widefield.data.windowed_files import name_of_image
from widefield.geometry.box import Box, full_box
from widefield.geometry.interval import Interval, pieces_of

Array = np.ndarray[Any, Any]
MOST_PX = 1024
"""The longer side of a mask that Otsu's threshold makes."""
GREY = 7
"""Saturation up to which a pixel is grey and no tissue, whatever the threshold: a slide of glass alone has none."""
SAME_SHAPE = 0.02
"""How far the height and the width of a mask may be from the same part of the slide's, beside a pixel of rounding."""


@dataclass(frozen=True)
class Tissue:
    """mask: (h, w) bool, of a slide of `size` pixels.  threshold: of saturation, 0 to 255; None: it is from a file."""

    mask: Array
    size: tuple[int, int]
    threshold: int | None = None

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the slide per pixel of the mask."""
        height, width = self.mask.shape
        return self.size[0] / height, self.size[1] / width

    @property
    def share(self) -> float:
        return float(self.mask.mean())

    def part(self, window: Box) -> Array:
        """Which pixels of a window count, bool.  It depends on their places in the whole alone."""
        rows, columns = (
            np.arange(run.start, run.stop) * low // extent
            for run, low, extent in zip(window, self.mask.shape, self.size, strict=True)
        )
        return self.mask[np.ix_(rows, columns)]

    def is_in(self, box: Box) -> bool:
        """Whether some pixel of a box, which may reach beyond the slide, counts."""
        low = []
        for run, pixels, extent in zip(box, self.mask.shape, self.size, strict=True):
            start, stop = max(0, run.start), min(extent, run.stop)
            low.append(slice(start * pixels // extent, (stop - 1) * pixels // extent + 1) if start < stop else slice(0, 0))
        return bool(self.mask[tuple(low)].any())

    def draw(self, generator: np.random.Generator) -> tuple[int, ...]:
        """The place of a pixel that counts: one of the mask, each as likely, then one in it."""
        chosen = self._places[int(generator.integers(len(self._places)))]
        found = []
        for at, pixels, extent in zip(np.unravel_index(chosen, self.mask.shape), self.mask.shape, self.size, strict=True):
            first, last = -(-int(at) * extent // pixels), -(-(int(at) + 1) * extent // pixels)
            found.append(int(generator.integers(first, last)))
        return tuple(found)

    @cached_property
    def _places(self) -> Array:
        return np.flatnonzero(self.mask)


def tissue_of(images: WindowedImages, index: int, how: str) -> Tissue:
    """The tissue of a slide.  how: `otsu`, or the folder of the masks.

    ValueError: no such mask, one of another shape, or a slide that is not of 8-bit colours.
    """
    _, height, width = images.shape(index)
    if how == "otsu":
        return _by_otsu(images, index, (height, width))
    return _of_file(_mask_file(Path(how), images.name_of(index)), images.name_of(index), (height, width))


def _mask_file(folder: Path, name: str) -> Path:
    stem = name_of_image(Path(name)).name
    found = [folder / f"{stem}{suffix}" for suffix in SUFFIXES if (folder / f"{stem}{suffix}").exists()]
    if len(found) != 1:
        what = f"{len(found)} masks, {found[0].name} and {found[1].name}," if found else "no mask"
        raise ValueError(
            f"data.tissue={folder} has {what} for the slide {name}; one named {stem}.png is wanted, or data.tissue=otsu"
        )
    return found[0]


def _of_file(file: Path, name: str, size: tuple[int, int]) -> Tissue:
    mask = raw_mask(file) != 0
    if mask.ndim != 2:
        raise ValueError(f"the mask of tissue {file} has the shape {mask.shape}; (H, W) is wanted")
    (low_height, low_width), (height, width) = mask.shape, size
    wanted = low_height * width / height  # the width that a mask of this height has
    rounding = 1 + width / height
    if low_height > height or low_width > width or abs(low_width - wanted) > SAME_SHAPE * wanted + rounding:
        raise ValueError(
            f"the mask of tissue {file} is {low_height} x {low_width} pixels and the slide {name} is {height} x {width}: it is "
            "of another shape, or larger; save the mask of the whole slide at one scale for both sides"
        )
    return Tissue(mask, size)


def _by_otsu(images: WindowedImages, index: int, size: tuple[int, int]) -> Tissue:
    read, extents = _low_level(images, index)
    if images.shape(index)[0] < 3:
        raise ValueError(
            f"data.tissue=otsu looks at the saturation of colours and {images.name_of(index)} has {images.shape(index)[0]} "
            "channel; name a folder of masks, as data.tissue=masks/"
        )
    step = max(1, -(-max(extents) // MOST_PX))
    bands = []
    for rows in pieces_of(Interval(0, extents[0]), step * max(1, 64 // step)):
        colours = read((rows, Interval(0, extents[1])))[:3]
        if colours.dtype != np.uint8:
            raise ValueError(
                f"data.tissue=otsu looks at 8-bit colours and {images.name_of(index)} has pixels of {colours.dtype}; name a "
                "folder of masks, as data.tissue=masks/"
            )
        bands.append(_reduced(colours, step))
    saturation = _saturation(np.concatenate(bands, axis=1))
    threshold = max(otsu(saturation), GREY)
    return Tissue(saturation > threshold, size, threshold)


def _low_level(images: WindowedImages, index: int) -> tuple[Callable[[Box], Array], tuple[int, ...]]:
    """What reads a box of the lowest level that is not below MOST_PX, else of the slide, and that level's size."""
    of = getattr(images, "image_file", None)
    file = None if of is None else of(index)
    if file is None:
        return lambda box: images.read_window(index, box)[0].numpy(), tuple(images.shape(index)[1:])
    fine = [number for number, level in enumerate(file.info.levels) if max(level.size) >= MOST_PX] or [0]
    level = file.info.levels[fine[-1]]
    return lambda box: file.read(box, fine[-1]), level.size


def _reduced(colours: Array, step: int) -> Array:
    """(3, h, w) means of squares of `step` pixels; at the border of what there is of them."""
    height, width = colours.shape[1:]
    padding = [(0, 0), (0, -height % step), (0, -width % step)]
    padded = np.pad(colours, padding, mode="edge") if step > 1 else colours
    return padded.reshape(3, padded.shape[1] // step, step, padded.shape[2] // step, step).mean((2, 4))


def _saturation(colours: Array) -> Array:
    """(h, w) 0 to 255: of hue, saturation and value."""
    most, least = colours.max(0), colours.min(0)
    return np.round(255 * (most - least) / np.maximum(most, 1)).astype(np.uint8)


def otsu(values: Array) -> int:
    """The threshold of uint8 numbers with the largest variance between those up to it and those above it.

    >>> otsu(np.array([3, 4, 4, 5, 90, 91, 93], dtype=np.uint8))
    5
    """
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, total = np.cumsum(counts), counts.sum()
    sums = np.cumsum(counts * np.arange(256))
    above = total - below
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return int(np.nan_to_num(apart).argmax())


class TissueImages:
    """Slides with their tissue as a last channel, of 255 where a pixel counts, for models that pool over what counts.

    What else is known of a slide is what `images` say.
    """

    def __init__(self, images: WindowedImages, tissue: Sequence[Tissue]) -> None:
        self._images, self.tissue = images, tissue

    def __len__(self) -> int:
        return len(self._images)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "image_file":  # a file has no such channel
            raise AttributeError(name)
        return getattr(self._images, name)

    def name_of(self, index: int) -> str:
        return self._images.name_of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        channels, *size = self._images.shape(index)
        return (channels + 1, *size)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return self.read_window(index, full_box(self._images.shape(index)[1:]))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        image, target = self._images.read_window(index, window)
        counts = torch.from_numpy(self.tissue[index].part(window).astype(np.uint8))
        return torch.cat([image, 255 * counts[None]]), target


def with_channel(image: Tensor, tissue: Tissue) -> Tensor:
    """A whole slide (C, H, W) of uint8 with its tissue as a last channel."""
    counts = torch.from_numpy(tissue.part(full_box(tissue.size)).astype(np.uint8))
    return torch.cat([image, 255 * counts[None]])
