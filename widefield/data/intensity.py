"""From pixels as a file has them to numbers of about 0 to 1, or of mean 0, before `data.mean` and `data.std` apply.

A pixel becomes (pixel - low) / (high - low).  low and high are the limits of the dtype, or given, or come from the statistics
of the training split.  The network then gets (that - mean) / std.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

OF_VALUES = "(value - mean) / std"
Area = Literal["all", "nonzero"]
"""The pixels of an image whose mean and standard deviation are taken."""


@dataclass(frozen=True)
class Intensity:
    """low, high: per channel, or one for all; None: the limits of the pixels' dtype, and 0 and 1 for floating-point pixels.

    clip: the least and the greatest number, per channel or one for all, that pixels are limited to first.
    each_image: instead, subtract each image's own mean and divide by its own standard deviation, per channel, over these of its
        pixels, before data.mean and data.std apply.
    statistics: which ones of the images to train on the numbers are, in words; None: they are none.
    """

    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    clip: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    each_image: Area | None = None
    statistics: str | None = None

    def of(self, dtype: torch.dtype) -> Intensity:
        """The same with low and high as numbers, for pixels of `dtype`."""
        low, high = limits_of(dtype)
        return Intensity(self.low or (low,), self.high or (high,), self.clip, self.each_image)

    def shown(self, dtype: torch.dtype) -> tuple[float, float]:
        """The pixel values that pictures show as black and as white: those of the clip, or two deviations about the mean."""
        if self.clip is not None:
            return min(self.clip[0]), max(self.clip[1])
        if self.low is None or self.high is None or (self.low, self.high) == ((0.0,), (1.0,)):
            return limits_of(dtype)
        low, high = min(self.low), max(self.high)
        return 3 * low - 2 * high, 2 * high - low

    def formula(self, dtype: torch.dtype) -> str:
        """What becomes of a pixel, with the words mean and std for data.mean and data.std.

        >>> Intensity().formula(torch.uint8), Intensity().formula(torch.float32)
        ('(value / 255 - mean) / std', '(value - mean) / std')
        """
        if self.each_image is not None:
            return f"((value - mean of the image) / std of the image - mean) / std, over {self.each_image} pixels of the image"
        known = self.of(dtype)
        if known.low == (0.0,) and known.high and len(known.high) == 1 and self.clip is None:
            return OF_VALUES if known.high == (1.0,) else f"(value / {known.high[0]:g} - mean) / std"
        value = "value" if self.clip is None else "min(max(value, clip[0]), clip[1])"
        return f"(({value} - low) / (high - low) - mean) / std"

    def to_tree(self) -> dict[str, Any]:
        """For JSON; `from_tree` reads it."""
        low, high = (None if side is None else list(side) for side in (self.low, self.high))
        return {
            "low": low,
            "high": high,
            "clip": None if self.clip is None else list(map(list, self.clip)),
            "each_image": self.each_image,
            "statistics": self.statistics,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Intensity:
        """ValueError, TypeError, LookupError: it is not what `to_tree` gave."""
        low, high = (None if tree[side] is None else tuple(float(value) for value in tree[side]) for side in ("low", "high"))
        if tree["each_image"] not in (None, "all", "nonzero"):
            raise ValueError(f"each_image is {tree['each_image']!r}")
        clip, statistics = None, tree.get("statistics")
        if tree["clip"] is not None:
            least, most = (tuple(float(value) for value in side) for side in tree["clip"])
            clip = (least, most)
        return cls(low, high, clip, tree["each_image"], None if statistics is None else str(statistics))


def in_words(dtype: torch.dtype) -> str:
    """The kind of pixels, for messages: as uint16, or floating-point."""
    return "floating-point" if dtype.is_floating_point else str(dtype).removeprefix("torch.")


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """The pixel values that become 0 and 1.

    >>> limits_of(torch.uint16), limits_of(torch.float32)
    ((0.0, 65535.0), (0.0, 1.0))
    """
    if dtype.is_floating_point:
        return 0.0, 1.0
    about = torch.iinfo(dtype)
    return float(about.min), float(about.max)


def moments_of(image_CHW: Tensor, area: Area) -> Tensor:
    """(C, 2) float64: mean and standard deviation of each channel of a whole image, 1 where all its pixels are equal.

    area: "nonzero" leaves out pixels that are 0 in the channel; where all are, the mean is 0 and the deviation 1.
    """
    moments = []
    for channel in image_CHW:
        values = channel.to(torch.float64).flatten()
        values = values[values != 0] if area == "nonzero" else values
        spread = values.std(correction=0).item() if len(values) else 0.0
        moments.append([values.mean().item() if len(values) else 0.0, spread if spread > 0 else 1.0])
    return torch.tensor(moments, dtype=torch.float64)


def moments_of_bands(bands: Callable[[], Iterable[Tensor]], area: Area) -> Tensor:
    """(C, 2) float64, as `moments_of` the whole image.  bands: from the start each time, its parts (C, ...), twice.

    The deviation comes from the second pass, since a sum of squares less a square loses its digits.
    """
    counts, sums = _added(bands, area, None)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), 0)
    _, squares = _added(bands, area, means)
    spread = (squares / counts.clamp(min=1)).sqrt()
    return torch.stack([means, torch.where(spread > 0, spread, 1)], 1)


def _added(bands: Callable[[], Iterable[Tensor]], area: Area, means: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per channel, how many pixels count, and the sum of their numbers, or of the squares of what they are off `means`."""
    counts = sums = torch.zeros(1, dtype=torch.float64)
    for band in bands():
        values = band.to(torch.float64).flatten(1)
        counted = torch.ones_like(values) if area == "all" else (values != 0).to(torch.float64)
        counts = counts + counted.sum(1)
        sums = sums + ((values if means is None else (values - means[:, None]) ** 2) * counted).sum(1)
    return counts, sums
