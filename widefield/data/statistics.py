"""SplitStatistics of the pixels and labels of a split: one pass over its images, shared among ranks.

Of integer pixels there is a histogram, so all numbers are exact, whatever the order.  Of floating-point pixels, images are
merged in their order, so that all ranks give one rank's numbers; percentiles come from a second pass, with an error of at most
1/65,536 of the range.  Pixels that are no finite number do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.data import BadImageError, Images, Labels
from widefield.data.counts import label_counts
from widefield.data.intensity import limits_of
from widefield.data.sources import read_seeded
from widefield.data.transforms import seed_of

BINS = 65536
PERCENTS = (0.0, 0.5, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.5, 100.0)
Gather = Callable[[Any], list[Any]]
"""Every rank's value, in rank order, on every rank."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ChannelStatistics:
    """pixels: those that count.  percentiles: by percent."""

    pixels: int
    mean: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True)
class SplitStatistics:
    """labels: of class numbers, how many images or pixels each has.  sizes: images by (H, W), or (D, H, W).

    skipped: unreadable images.
    """

    images: int
    channels: list[ChannelStatistics]
    sizes: dict[tuple[int, ...], int]
    dtypes: dict[str, int]
    labels: dict[int, int]
    skipped: list[str] = field(default_factory=list)

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        tree = asdict(self)
        tree["sizes"] = [[*size, count] for size, count in sorted(self.sizes.items())]
        return tree


@dataclass
class _Seen:
    """What one rank has seen.  histogram: (C, bins) of integers.  parts: by image and channel, (pixels, mean, sum of squares
    about it, least, most) of floating-point pixels."""

    histogram: Array
    parts: dict[int, list[tuple[int, float, float, float, float]]] = field(default_factory=dict)
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    problem: str | None = None


def statistics_of(
    images: Images,
    *,
    channels: int,
    dtype: torch.dtype,
    labels: Labels,
    percents: Sequence[float] = (),
    foreground: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    gather: Gather = lambda value: [value],
    skip: bool = False,
    done: Callable[[], None] = lambda: None,
) -> SplitStatistics:
    """SplitStatistics of all images.  Every rank calls it, and reads every `ranks`-th image.

    labels: the kind of targets.  percents: further percentiles.  foreground: the number of classes, where only pixels of
        classes other than the first count, or of any class where a pixel may have several.  skip: leave unreadable images out.
    done: called after each image.
    Cost: reading each image once, twice of floating-point pixels; a message of 0.5 MB per rank and channel.
    ValueError, on every rank: an image that cannot be read, has other channels or dtype, or no image has a finite pixel.
    """
    _check_foreground(foreground, labels)
    numbers = range(rank, len(images), ranks)
    seen = _Seen(np.zeros((channels, 0 if dtype.is_floating_point else _bins(dtype)), dtype=np.int64))
    try:
        for index, image, target in _read(images, numbers, seen, skip=skip):
            _check_kind(image, channels=channels, dtype=dtype, name=images.name_of(index))
            _add(seen, index, image, _counted(image, target, foreground), dtype)
            seen.labels.update(label_counts(target, labels))
            done()
    except ValueError as error:
        seen.problem = str(error)
    every = _agreed(gather(seen))
    wanted = sorted({*PERCENTS, *percents})
    floats = partial(_of_floats, every, images, numbers, wanted, gather, channels=channels, skip=skip)
    found = floats(foreground=foreground) if dtype.is_floating_point else _of_integers(every, dtype, wanted)
    return _joined(every, found)


def _joined(every: list[_Seen], channels: list[ChannelStatistics]) -> SplitStatistics:
    """What all ranks have seen."""
    sizes, dtypes, labels = (sum((getattr(one, name) for one in every), Counter()) for name in ("sizes", "dtypes", "labels"))
    skipped = [name for one in every for name in one.skipped]
    return SplitStatistics(sum(sizes.values()), channels, dict(sizes), dict(dtypes), dict(sorted(labels.items())), skipped)


def _check_foreground(foreground: int | None, labels: Labels) -> None:
    if foreground is not None and labels not in ("pixels", "layers"):
        raise ValueError("pixels of the foreground have classes, and here images have labels; set data.intensity.area=all")


def _agreed(every: list[_Seen]) -> list[_Seen]:
    """ValueError, on every rank: any rank has a problem."""
    problem = next((one.problem for one in every if one.problem is not None), None)
    if problem is not None:
        raise ValueError(problem)
    return every


def _bins(dtype: torch.dtype) -> int:
    low, high = limits_of(dtype)
    return int(high - low) + 1


def _read(images: Images, numbers: Sequence[int], seen: _Seen, *, skip: bool) -> Iterator[tuple[int, Tensor, int | Tensor]]:
    for index in numbers:
        try:
            image, target = read_seeded(images, index, seed_of(0, "statistics", index))
        except BadImageError as error:
            if not skip:
                raise BadImageError(f"{error}; mend or remove it, or set data.bad_images=skip") from None
            seen.skipped.append(images.name_of(index))
            continue
        yield index, image, target


def _counted(image: Tensor, target: int | Tensor, foreground: int | None) -> Tensor:
    """The pixels (C, N) that count."""
    if foreground is None:
        return image.flatten(1)
    assert isinstance(target, Tensor)
    inside = (target > 0) & (target < foreground) if target.ndim < image.ndim else (target > 0).any(0)
    return image[:, inside]


def _check_kind(image: Tensor, *, channels: int, dtype: torch.dtype, name: str) -> None:
    """ValueError: the image is not as the others."""
    if (
        len(image) != channels
        or image.is_floating_point() != dtype.is_floating_point
        or (not dtype.is_floating_point and image.dtype != dtype)
    ):
        raise ValueError(
            f"{name} has {len(image)} channels of {image.dtype} and the images have {channels} of {dtype}; let all have "
            "the same"
        )


def _add(seen: _Seen, index: int, image: Tensor, pixels: Tensor, dtype: torch.dtype) -> None:
    """pixels: (C, N), those that count."""
    seen.sizes[tuple(image.shape[1:])] += 1
    seen.dtypes[str(image.dtype).removeprefix("torch.")] += 1
    if image.is_floating_point():
        seen.parts[index] = [_moments(channel) for channel in pixels]
        return
    low = int(limits_of(dtype)[0])
    for row, channel in zip(seen.histogram, pixels, strict=True):
        row += np.bincount(channel.to(torch.int32).numpy() - low, minlength=len(row))


def _of_integers(every: list[_Seen], dtype: torch.dtype, percents: Sequence[float]) -> list[ChannelStatistics]:
    total = sum((one.histogram for one in every[1:]), every[0].histogram)
    return [_of_histogram(row, int(limits_of(dtype)[0]), percents) for row in total]


def _of_histogram(row: Array, low: int, percents: Sequence[float]) -> ChannelStatistics:
    """Exact numbers, from integers."""
    pixels = int(row.sum())
    if pixels == 0:
        raise ValueError("no image has a pixel, so there are no statistics; give images")
    present = np.flatnonzero(row)
    values, counts = [int(place) + low for place in present], [int(row[place]) for place in present]
    total = sum(value * count for value, count in zip(values, counts, strict=True))
    squares = sum(value * value * count for value, count in zip(values, counts, strict=True))
    variance = Fraction(squares * pixels - total * total, pixels * pixels)
    return ChannelStatistics(pixels, total / pixels, float(variance) ** 0.5, _percentiles(row, percents, lambda at: at + low))


def _percentiles(row: Array, percents: Sequence[float], value_of: Callable[[Any], Any]) -> dict[float, float]:
    """As numpy.percentile gives them: linear between the two nearest pixels in order."""
    ends, pixels, found = np.cumsum(row), int(row.sum()), {}
    for percent in percents:
        place = percent / 100 * (pixels - 1)
        lower, share = int(place), place - int(place)
        one, other = (
            float(value_of(int(np.searchsorted(ends, at, side="right")))) for at in (lower, min(lower + 1, pixels - 1))
        )
        found[percent] = one + (other - one) * share
    return found


# ---------------------------------------------------------------------------------------------- floating-point pixels


def _moments(channel: Tensor) -> tuple[int, float, float, float, float]:
    values = channel.to(torch.float64).flatten()
    values = values[values.isfinite()]
    if not len(values):
        return 0, 0.0, 0.0, float("inf"), float("-inf")
    mean = values.mean()
    return len(values), mean.item(), (values - mean).square().sum().item(), values.min().item(), values.max().item()


def _of_floats(
    every: list[_Seen], images: Images, numbers: Sequence[int], percents: Sequence[float], gather: Gather,
    *, channels: int, skip: bool, foreground: int | None,
) -> list[ChannelStatistics]:  # fmt: skip
    parts = {index: part for one in every for index, part in one.parts.items()}
    merged = [_merged([parts[index][channel] for index in sorted(parts)]) for channel in range(channels)]
    seen = _Seen(np.zeros((channels, BINS), dtype=np.int64))
    try:
        for _, image, target in _read(images, numbers, seen, skip=skip):
            pixels = _counted(image, target, foreground)
            for row, channel, (_, _, _, low, high) in zip(seen.histogram, pixels, merged, strict=True):
                values = channel.to(torch.float64)
                place = (values[values.isfinite()] - low) * (BINS / (high - low) if high > low else 0.0)
                row += np.bincount(place.long().clamp(0, BINS - 1).numpy(), minlength=BINS)
    except ValueError as error:
        seen.problem = str(error)
    every = _agreed(gather(seen))
    total, found = sum((one.histogram for one in every), np.zeros_like(seen.histogram)), []
    for row, (pixels, mean, squares, low, high) in zip(total, merged, strict=True):
        width = (high - low) / BINS
        percentiles = _percentiles(row, percents, lambda at, low=low, width=width: low + (at + 0.5) * width)
        ends = {0.0: low, 100.0: high}
        exact = {percent: ends.get(percent, value) for percent, value in percentiles.items()}
        found.append(ChannelStatistics(pixels, mean, (squares / pixels) ** 0.5, exact))
    return found


def _merged(parts: Sequence[tuple[int, float, float, float, float]]) -> tuple[int, float, float, float, float]:
    """Of all images, in their order (Chan et al. 1979).  ValueError: no pixel is a finite number."""
    pixels, mean, squares, low, high = 0, 0.0, 0.0, float("inf"), float("-inf")
    for count, its_mean, its_squares, its_low, its_high in parts:
        if count:
            both, apart = pixels + count, its_mean - mean
            squares += its_squares + apart * apart * pixels * count / both
            mean += apart * count / both
            pixels, low, high = both, min(low, its_low), max(high, its_high)
    if not pixels:
        raise ValueError("no image has a pixel that is a finite number, so there are no statistics; mend the images")
    return pixels, mean, squares, low, high
