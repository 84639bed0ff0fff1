"""Labels by overlapping windows whose answers are blended: for networks that were trained on patches, as others predict.

The network runs on each window alone, so a pixel near a window's border is answered without what lies beyond.  Its outputs (not
probabilities) are averaged with Gaussian weights of a deviation of an eighth of the window, as nnU-Net and MONAI do: Isensee et
al. 2021, and `monai.inferers.sliding_window_inference` with mode="gaussian".

Where the windows lie depends on the image alone.  The image is written in blocks; each takes all windows that reach into it, in
reading order, so what is added, and in which order, does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from widefield.geometry.box import Box, is_empty, meet, size_of, within
from widefield.geometry.interval import Interval, pieces_of
from widefield.streaming.storage.windowed_image import WindowedImage

WINDOWS_IN_BLOCK = 4
"""A block's side, in windows: those that reach beyond it run again for the next block."""
LEAST = 1e-3
"""Of a weight, as MONAI's: so that a pixel at the corner of an image has one."""


@dataclass(frozen=True)
class SlidingWindows:
    """size: of a window, for every dim or for all alike.  overlap: the share of a window that the next one covers too."""

    size: tuple[int, ...]
    overlap: float = 0.5

    def size_on(self, extents: Sequence[int]) -> tuple[int, ...]:
        """No longer than the image."""
        sides = self.size * len(extents) if len(self.size) == 1 else self.size
        return tuple(min(side, extent) for side, extent in zip(sides, extents, strict=True))

    def blocks(self, extents: Sequence[int]) -> list[Box]:
        """Boxes that cover the image once."""
        steps = [WINDOWS_IN_BLOCK * side for side in self.size_on(extents)]
        runs = [list(pieces_of(Interval(0, extent), step)) for extent, step in zip(extents, steps, strict=True)]
        return list(product(*runs))

    def windows_on(self, block: Box, extents: Sequence[int]) -> Iterator[Box]:
        """The windows that reach into a block, in reading order."""
        sides = self.size_on(extents)
        starts = [_starts(extent, side, self.overlap) for extent, side in zip(extents, sides, strict=True)]
        for place in product(*starts):
            window = tuple(Interval(start, start + side) for start, side in zip(place, sides, strict=True))
            if not is_empty(meet(window, block)):
                yield window


def _starts(extent: int, side: int, overlap: float) -> list[int]:
    """Where windows begin along a dim: equally far apart, but for the last, which ends with the image.

    >>> _starts(100, 40, 0.5), _starts(30, 40, 0.5), _starts(80, 40, 0.0)
    ([0, 20, 40, 60], [0], [0, 40])
    """
    step = max(1, int(side * (1 - overlap)))
    return [min(start, extent - side) for start in range(0, max(1, extent - side + step), step)] if extent > side else [0]


def weights_of(size: Sequence[int]) -> Tensor:
    """Of the pixels of a window; that of its centre is 1."""
    total = torch.ones((), dtype=torch.float64)
    for side in size:
        distance = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
        total = total[..., None] * torch.exp(-0.5 * (distance / (side / 8)) ** 2)
    return total.clamp(min=LEAST)


def blended(network: nn.Module, image: WindowedImage, block: Box, windows: SlidingWindows) -> Tensor:
    """The mean output (1, K, *block) of the windows that reach into a block.  image: (1, C, *pixels)."""
    extents = tuple(image.shape[2:])
    weight = weights_of(windows.size_on(extents)).to(image.device)
    total, weights = None, torch.zeros(size_of(block), dtype=torch.float64, device=image.device)
    for window in windows.windows_on(block, extents):
        output = _output(network, image, window)
        part = meet(window, block)
        inner, outer = (within(box, part) for box in (window, block))
        factor = weight[inner]
        if total is None:
            total = torch.zeros((1, output.shape[1], *size_of(block)), dtype=output.dtype, device=output.device)
        total[(..., *outer)] += output[(..., *inner)] * factor.to(output.dtype)
        weights[outer] += factor
    assert total is not None
    return total / weights.to(total.dtype)


def _output(network: nn.Module, image: WindowedImage, window: Box) -> Tensor:
    """In float32 or wider.  ValueError: the network changes the size."""
    whole = (Interval(0, 1), Interval(0, image.shape[1]))
    output = network(image.read((*whole, *window)))
    if tuple(output.shape[2:]) != size_of(window):
        raise ValueError(
            f"the model answers for {tuple(output.shape[2:])} pixels of a window of {size_of(window)}; take a model that keeps "
            "the image's size, or another --sliding"
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))
