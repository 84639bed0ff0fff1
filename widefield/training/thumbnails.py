"""Thumbnails of images, labels and predictions, which ranks make of their windows.

A thumbnail with labels has every s-th row and column of the image, counted from its corner; a small one without labels has the
means of blocks of s rows and columns.  So a rank's part depends only on its window, and the parts of several ranks, joined, are
the thumbnail of the whole image.

A thumbnail has one channel, grey, or three, red, green and blue.  Its size does not grow with the image.

Of a volume a small one has the middle plane; those with labels are the views of volume_thumbnails.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.data.batch import Batch
from widefield.geometry import Interval

SHOWN = 4
"""How many images of the evaluation split get a thumbnail with labels: always the first ones, so evaluations compare."""
LONGEST_PX = 700
SMALL_PX = 160
SAMPLED = 8
"""The most rows and columns of a block that its mean samples."""


@dataclass(frozen=True)
class Thumbnail:
    """One rank's part of the thumbnail of image number `index`, or all of it.

    image: (1 or 3, h, w) uint8.  truth, prediction: (h, w) class numbers; empty where the image has one class; where answers
    are images, (1 or 3, h, w) uint8.
    top, left: its place in the whole thumbnail, which has `shape` (h, w); the image has `size` (H, W) pixels.
    counted: pixels of the window, not of the thumbnail, that have a label; right: those predicted right.
    view: of a volume, which one it is; `size` is then (D, H, W).  voxels: where parts of ranks lie over each other and their
    largest values stand, how many are in the rank's window; else 0.
    """

    index: int
    size: tuple[int, ...]
    shape: tuple[int, int]
    top: int
    left: int
    image: Tensor
    truth: Tensor
    prediction: Tensor
    right: int = 0
    counted: int = 0
    view: str = ""
    voxels: int = 0
    squared_error: float = 0.0
    """Where answers are images: of the window's values from 0 to 1, of which there are `counted`."""


def channels_shown(image_CHW: Tensor) -> Tensor:
    """The first three channels; the first one where there are fewer."""
    return image_CHW[: 3 if len(image_CHW) >= 3 else 1]


def as_bytes(image: Tensor, shown: tuple[float, float]) -> Tensor:
    """An image as uint8; of any other dtype, the values `shown` become 0 and 255."""
    if image.dtype == torch.uint8:
        return image
    low, high = shown
    span = high - low or 1.0
    return ((image.float() - low) * (255 / span)).nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8)


def shown_in_words(channels: int) -> str | None:
    """Which channels of an image a thumbnail shows; None where it shows all.

    >>> shown_in_words(5)
    'channels 1, 2 and 3 of 5, as red, green and blue'
    >>> shown_in_words(2)
    'channel 1 of 2, in grey'
    """
    if channels in (1, 3):
        return None
    return f"channel 1 of {channels}, in grey" if channels < 3 else f"channels 1, 2 and 3 of {channels}, as red, green and blue"


def thumbnails_of(batch: Batch, answers: Tensor, target: Tensor, *, ignore: int) -> list[Thumbnail]:
    """This rank's parts of the thumbnails of a batch's images among the first SHOWN; answers, target: its (B, H, W) windows."""
    size, window = _place(batch)
    return [
        _labelled(
            int(index), size, window, batch.image[number], target[number].cpu(), answers[number].cpu(), ignore, batch.shown
        )
        for number, index in enumerate(batch.index)
        if index < SHOWN
    ]


def painted(layers: Tensor) -> Tensor:
    """From layers (B, K, *pixels) of 0 and 1 class numbers (B, *pixels) to show: 1 + the last class there is, 0 for none."""
    numbers = torch.arange(1, layers.shape[1] + 1, device=layers.device).view(-1, *[1] * (layers.ndim - 2))
    return ((layers > 0) * numbers).amax(1)


def _place(batch: Batch) -> tuple[tuple[int, ...], tuple[Interval, ...]]:
    """The size of the whole images, and this rank's window of them."""
    size = batch.shape[1:]
    return size, batch.window or tuple(Interval(0, extent) for extent in size)


def _labelled(
    index: int, size, window, image: Tensor, truth: Tensor, prediction: Tensor, ignore: int, shown: tuple[float, float]
) -> Thumbnail:
    every = -(-max(size) // LONGEST_PX)
    start = [-(-run.start // every) for run in window]
    rows, columns = (slice(first * every - run.start, None, every) for first, run in zip(start, window, strict=True))
    counted = truth != ignore
    return Thumbnail(
        index=index,
        size=size,
        shape=(-(-size[0] // every), -(-size[1] // every)),
        top=start[0],
        left=start[1],
        image=as_bytes(channels_shown(image)[:, rows, columns], shown).cpu().clone(),
        truth=truth[rows, columns].clone(),
        prediction=prediction[rows, columns].clone(),
        right=int(((prediction == truth) & counted).sum()),
        counted=int(counted.sum()),
    )


def small_thumbnail_of(batch: Batch, row: int, *, longest_px: int = SMALL_PX) -> Thumbnail | None:
    """This rank's part of the thumbnail, up to `longest_px` long, of one image of a batch.

    Of a volume, of its middle plane; None where this rank has nothing of that.
    """
    (size, window), image = _place(batch), batch.image[row]
    if len(size) == 3:
        plane = size[0] // 2 - window[0].start
        if not 0 <= plane < len(window[0]):
            return None
        size, window, image = size[1:], window[1:], image[:, plane]
    every = -(-max(size) // longest_px)
    step = -(-every // SAMPLED)
    every = -(-every // step) * step
    start = [-(-run.start // every) for run in window]
    rows, columns = (slice(first * every - run.start, None, step) for first, run in zip(start, window, strict=True))
    sampled = as_bytes(channels_shown(image)[:, rows, columns], batch.shown)
    shape = (-(-size[0] // every), -(-size[1] // every))
    nothing = torch.zeros(0, 0, dtype=torch.uint8)
    return Thumbnail(int(batch.index[row]), size, shape, *start, _means(sampled, every // step).cpu(), nothing, nothing)


def _means(image_CHW: Tensor, side: int) -> Tensor:
    """The means of blocks of `side` rows and columns; the last ones may be smaller."""
    if image_CHW.numel() == 0:
        return image_CHW.new_zeros(len(image_CHW), *(-(-length // side) for length in image_CHW.shape[1:]))
    if side == 1:
        return image_CHW.clone()
    means = F.avg_pool2d(image_CHW.float(), side, ceil_mode=True, count_include_pad=False)
    return means.round().clamp(0, 255).to(torch.uint8)


def join_thumbnails(pieces: Sequence[Thumbnail]) -> list[Thumbnail]:
    """The whole Thumbnail of each image, by image number and view; those with a missing part are left out."""
    wholes = []
    for key in sorted({(piece.index, piece.view) for piece in pieces}):
        parts = [piece for piece in pieces if (piece.index, piece.view) == key]
        whole = _join(parts)
        there = sum(part.voxels or part.image[0].numel() for part in parts)
        if there == (math.prod(whole.size) if parts[0].voxels else whole.image[0].numel()):
            wholes.append(whole)
    return wholes


def _join(parts: list[Thumbnail]) -> Thumbnail:
    first = parts[0]
    image = torch.zeros(len(first.image), *first.shape, dtype=first.image.dtype)
    labelled = any(part.truth.numel() for part in parts)
    shape = (*first.truth.shape[:-2], *first.shape) if labelled else (0, 0)
    truth, prediction = (torch.zeros(shape, dtype=part.dtype) for part in (first.truth, first.prediction))
    for part in parts:
        height, width = part.image.shape[1:]
        place = (..., slice(part.top, part.top + height), slice(part.left, part.left + width))
        layers = ((image, part.image), *(((truth, part.truth), (prediction, part.prediction)) if labelled else ()))
        for whole, one in layers:
            whole[place] = torch.maximum(whole[place], one) if part.voxels else one
    right, counted, voxels = (sum(getattr(part, name) for part in parts) for name in ("right", "counted", "voxels"))
    error = sum(part.squared_error for part in parts)
    labels = (truth, prediction, right, counted)
    return Thumbnail(first.index, first.size, first.shape, 0, 0, image, *labels, first.view, voxels, error)
