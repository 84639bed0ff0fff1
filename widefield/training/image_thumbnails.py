"""Thumbnails of images whose answers are images: input, target and output, all on the grid of the target.

Every s-th row and column of the target's grid is shown, and of the input the pixels that lie there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widefield.data.batch import Batch
from widefield.geometry import Interval
from widefield.geometry.box import enlarged
from widefield.training.thumbnails import LONGEST_PX, SHOWN, Thumbnail, as_bytes, channels_shown


def pictures_of(
    batch: Batch, answers: Tensor, target: Tensor, *, first: int = SHOWN, longest_px: int = LONGEST_PX
) -> list[Thumbnail]:
    """This rank's parts of the thumbnails of a batch's images among the first so many; none of volumes.

    answers, target: (B, K, H, W) from 0 to 1, its windows.  longest_px: the longest side that a thumbnail may have.
    """
    if batch.image.ndim != 4:
        return []
    return [
        _picture(batch, number, answers[number].cpu(), target[number].cpu(), longest_px)
        for number, index in enumerate(batch.index)
        if index < first
    ]


def _picture(batch: Batch, number: int, answer: Tensor, target: Tensor, longest_px: int) -> Thumbnail:
    image, size = batch.image[number], batch.shape[1:]
    window = batch.window or tuple(Interval(0, extent) for extent in size)
    scale = max(1, *(got // own for got, own in zip(target.shape[1:], image.shape[1:], strict=True) if own))
    size, place = tuple(scale * extent for extent in size), enlarged(window, scale)
    every = -(-max(size) // longest_px)
    start = [-(-run.start // every) for run in place]
    rows, columns = (torch.arange(first * every, run.stop, every) - run.start for first, run in zip(start, place, strict=True))
    shown = [as_bytes(channels_shown(one)[:, rows][:, :, columns], (0.0, 1.0)) for one in (target, answer)]
    return Thumbnail(
        index=int(batch.index[number]),
        size=size,
        shape=(-(-size[0] // every), -(-size[1] // every)),
        top=start[0],
        left=start[1],
        image=as_bytes(channels_shown(image)[:, rows // scale][:, :, columns // scale], batch.shown).cpu().clone(),
        truth=shown[0],
        prediction=shown[1],
        counted=target.numel(),
        squared_error=float((answer.double() - target.double()).square().sum()),
    )
