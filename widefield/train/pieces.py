"""What does a network see of an image, small enough to show?  Thinned pictures that ranks make of their windows.

A picture keeps every s-th row and column of the whole, counted from its corner.  So what a window shows of it depends on
where the window lies and on nothing beside it, and pieces of several ranks put together are the picture of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.data.loader import Batch
from widefield.geometry import Interval

SHOWN = 4
"""So many images of the evaluation split are pictured, the first ones, so that evaluations show the same."""
LONGEST_PX = 700


@dataclass(frozen=True)
class Piece:
    """What one rank holds of image `index`, thinned: `image` (C, h, w) uint8, `truth` and `prediction` (h, w) class numbers.

    `top` and `left` place it in the picture of the whole, which is `shape` (h, w); the whole has `size` (H, W) pixels.
    `right` of the `counted` pixels of the window, before thinning, were answered right.
    """

    index: int
    size: tuple[int, int]
    shape: tuple[int, int]
    top: int
    left: int
    image: Tensor
    truth: Tensor
    prediction: Tensor
    right: int
    counted: int


def pieces_of(batch: Batch, answers: Tensor, target: Tensor, *, ignore: int) -> list[Piece]:
    """Pieces of those images of a batch that are shown; (B, H, W) `answers` and `target` as this rank holds them."""
    if target.ndim != 3:  # volumes have no picture
        return []
    size = tuple((batch.whole_shape or batch.image.shape)[-2:])
    window = batch.window or tuple(Interval(0, length) for length in size)
    return [
        _piece(int(index), size, window, batch.image[number], target[number].cpu(), answers[number].cpu(), ignore)
        for number, index in enumerate(batch.index)
        if index < SHOWN
    ]


def _piece(index: int, size, window, image: Tensor, truth: Tensor, prediction: Tensor, ignore: int) -> Piece:
    every = -(-max(size) // LONGEST_PX)
    start = [-(-run.start // every) for run in window]
    rows, columns = (slice(first * every - run.start, None, every) for first, run in zip(start, window, strict=True))
    counted = truth != ignore
    return Piece(
        index=index,
        size=size,
        shape=(-(-size[0] // every), -(-size[1] // every)),
        top=start[0],
        left=start[1],
        image=image[:, rows, columns].cpu().clone(),
        truth=truth[rows, columns].clone(),
        prediction=prediction[rows, columns].clone(),
        right=int(((prediction == truth) & counted).sum()),
        counted=int(counted.sum()),
    )


def put_together(pieces: Sequence[Piece]) -> list[Piece]:
    """One whole Piece for each image, in their order; an image of which a rank's part is missing is left out."""
    wholes = []
    for index in sorted({piece.index for piece in pieces}):
        parts = [piece for piece in pieces if piece.index == index]
        whole = _join(parts)
        if sum(part.truth.numel() for part in parts) == whole.truth.numel():
            wholes.append(whole)
    return wholes


def _join(parts: list[Piece]) -> Piece:
    first = parts[0]
    image = torch.zeros(len(first.image), *first.shape, dtype=first.image.dtype)
    truth, prediction = (torch.zeros(first.shape, dtype=part.dtype) for part in (first.truth, first.prediction))
    for part in parts:
        place = (..., slice(part.top, part.top + len(part.truth)), slice(part.left, part.left + part.truth.shape[1]))
        image[place], truth[place], prediction[place] = part.image, part.truth, part.prediction
    right, counted = sum(part.right for part in parts), sum(part.counted for part in parts)
    return Piece(first.index, first.size, first.shape, 0, 0, image, truth, prediction, right, counted)
