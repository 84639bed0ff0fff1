"""Pixels of any dtype and any number of bands as grey or colour of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from widefield.image_files import ImageFile
from widefield.viewer.pyramid import Array
from widefield.viewer.reading import extents_of, spread

PERCENTILES = (1.0, 99.0)
"""Of the values that are shown as black and as white, where a dtype has no natural range."""
SAMPLE_PX, SAMPLE_WINDOWS = 256, (8, 8, 8)
"""The side of the windows whose values give the percentiles, and how many there are at most along each axis."""


@dataclass(frozen=True)
class Display:
    """bands: one, or three as red, green and blue, from 0 on.  low, high: of each, what is black and what is white.

    alpha: the band of transparency, if there is one.  palette: (numbers, 3 or 4), of which the pixels are numbers, if they are;
    the bands are those of the colours then.
    """

    bands: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    alpha: int | None = None
    palette: Array | None = None

    def sums(self, pixels: Array, valid: Array | None) -> tuple[Array, Array]:
        """The values of the shown bands, float64, 0 where a pixel holds nothing; and 1 where it holds something, else 0."""
        if self.palette is not None:
            pixels = np.moveaxis(self.palette[np.minimum(pixels[0], len(self.palette) - 1)], -1, 0)
        shown = pixels[list(self.bands)].astype(np.float64)
        holds = np.isfinite(shown).all(0)
        if valid is not None:
            holds &= valid
        if self.alpha is not None:
            holds &= pixels[self.alpha] > 0
        return np.where(holds, shown, 0.0), holds.astype(np.uint32)

    def as_bytes(self, sums: Array, counts: Array) -> Array:
        """(bands, H, W) of uint8: the mean of the pixels that hold something, in the range; 0 where none does."""
        low, span = np.array(self.low)[:, None, None], np.subtract(self.high, self.low)[:, None, None]
        mean = sums / np.maximum(counts, 1)
        return np.where(counts > 0, np.floor(255 * np.clip((mean - low) / span, 0, 1) + 0.5), 0).astype(np.uint8)

    def in_words(self) -> str:
        """As `bands 4, 3, 2 from 12 to 3000`, counted from 1."""
        if self.palette is not None:
            return "the colours of its palette"
        which = f"band{'s' if len(self.bands) > 1 else ''} {', '.join(str(band + 1) for band in self.bands)}"
        ranges = dict.fromkeys(f"{low:.6g} to {high:.6g}" for low, high in zip(self.low, self.high, strict=True))
        return f"{which} from {', '.join(ranges)}"


def display_of(image: ImageFile, bands: Sequence[int] | None, limits: tuple[float, float] | None) -> Display:
    """How an image is shown.  bands: from 1 on, as people count them.  limits: what is black and what is white.

    ValueError: the image has no such band.
    """
    info = image.info
    if info.palette and bands is None and limits is None:
        table = np.array(info.palette, dtype=np.uint8)
        return Display((0, 1, 2), (0.0,) * 3, (255.0,) * 3, 3 if table.shape[1] == 4 else None, table)
    alpha = info.channels - 1 if info.colours in ("LA", "RGBA") else None
    chosen = _bands(image, bands)
    if limits is not None:
        ranges = [limits] * len(chosen)
    elif info.dtype in ("uint8", "bool"):
        ranges = [(0.0, 255.0 if info.dtype == "uint8" else 1.0)] * len(chosen)
    else:
        ranges = _percentiles(image, Display(chosen, (0.0,) * len(chosen), (1.0,) * len(chosen), alpha))
    low, high = zip(*ranges, strict=True)
    return Display(chosen, low, high, alpha)


def _bands(image: ImageFile, bands: Sequence[int] | None) -> tuple[int, ...]:
    count = image.info.channels
    if bands is None:
        return (0, 1, 2) if count >= 3 else (0,)
    if len(bands) not in (1, 3):
        raise ValueError(f"--bands names {len(bands)} bands; write one for grey, or three for red, green and blue, as 4,3,2")
    if not all(1 <= band <= count for band in bands):
        raise ValueError(f"--bands is {','.join(map(str, bands))} and {image.path} has bands 1 to {count}; name some of these")
    return tuple(band - 1 for band in bands)


def _percentiles(image: ImageFile, display: Display) -> list[tuple[float, float]]:
    """Per band, of a sample of the image's pixels; (0, 1) where none holds anything."""
    values = np.concatenate(list(_sampled(image, display)), axis=1)
    if not values.size:
        return [(0.0, 1.0)] * len(display.bands)
    found = np.percentile(values, PERCENTILES, axis=1).T
    return [(float(low), float(high if high > low else low + 1)) for low, high in found]


def _sampled(image: ImageFile, display: Display) -> Iterator[Array]:
    """(bands, pixels) of windows that are spread evenly."""
    extents, sides = extents_of(image), (1, SAMPLE_PX, SAMPLE_PX)
    runs = [spread(extent, side, most) for extent, side, most in zip(extents, sides, SAMPLE_WINDOWS, strict=True)]
    for box in product(*runs):
        window = box[-len(image.info.size) :]
        sums, holds = display.sums(image.read(window), image.valid(window))
        yield sums[:, holds > 0]
