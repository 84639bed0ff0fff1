"""Thumbnails of volumes: the middle plane, and the largest value along each axis, which ranks make of their windows.

Of labels, the largest class number along the axis is shown; voxels that do not count show class 0 there.  A view of one rank
lies over those of others, and the larger values stand, so joined they are the view of the whole volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widefield.data.batch import Batch
from widefield.geometry import Interval
from widefield.training.thumbnails import SHOWN, Thumbnail, as_bytes, channels_shown

VIEWS = ("plane", "depth", "height", "width")
"""The middle plane, and along which axis the largest value is taken."""
LONGEST_PX = 350
_PLANES = 8
"""Planes that are made bytes at a time, so that a projection takes little memory."""


def volume_thumbnails_of(batch: Batch, answers: Tensor, target: Tensor, *, ignore: int) -> list[Thumbnail]:
    """This rank's views of a batch's volumes among the first SHOWN; answers, target: its (B, D, H, W) windows."""
    size = batch.shape[1:]
    window = batch.window or tuple(Interval(0, extent) for extent in size)
    found = []
    for number, index in enumerate(batch.index.tolist()):
        if index < SHOWN:
            labels = target[number].cpu(), answers[number].cpu()
            found += views_of(Part(index, size, window, batch.image[number], *labels, batch.shown), ignore=ignore)
    return found


@dataclass(frozen=True)
class Part:
    """What a rank has of volume number `index`: a window of the whole's `size` (D, H, W).

    image: (C, d, h, w).  truth, prediction: (d, h, w).  shown: the values that are black and white.
    """

    index: int
    size: tuple[int, ...]
    window: Sequence[Interval]
    image: Tensor
    truth: Tensor
    prediction: Tensor
    shown: tuple[float, float]


def views_of(part: Part, *, ignore: int) -> list[Thumbnail]:
    """This rank's parts of the views of a volume."""
    if not part.image.numel():
        return []
    counted = part.truth != ignore
    right = int(((part.prediction == part.truth) & counted).sum())
    truth, prediction = (torch.where(counted, one, torch.zeros_like(one)) for one in (part.truth, part.prediction))
    flat = replace(part, truth=truth, prediction=prediction)
    views = [
        replace(_view(flat, name, axis), right=right, counted=int(counted.sum()), voxels=counted.numel())
        for axis, name in enumerate(VIEWS[1:])
    ]
    middle = part.size[0] // 2 - part.window[0].start
    if not 0 <= middle < len(part.window[0]):
        return views
    plane = slice(middle, middle + 1)
    only = replace(part, image=part.image[:, plane], truth=part.truth[plane], prediction=part.prediction[plane])
    return [_view(only, "plane", 0), *views]


def _view(part: Part, name: str, axis: int) -> Thumbnail:
    """The largest values along an axis, of every s-th voxel along the two others."""
    every = -(-max(part.size) // LONGEST_PX)
    rows, columns = (dim for dim in range(3) if dim != axis)
    start = [-(-run.start // every) for run in part.window]
    place = [slice(first * every - run.start, None, every) for first, run in zip(start, part.window, strict=True)]
    place[axis] = slice(None)
    return Thumbnail(
        index=part.index,
        size=part.size,
        shape=(-(-part.size[rows] // every), -(-part.size[columns] // every)),
        top=start[rows],
        left=start[columns],
        image=_largest(channels_shown(part.image)[(slice(None), *place)], axis + 1, part.shown),
        truth=part.truth[tuple(place)].amax(axis),
        prediction=part.prediction[tuple(place)].amax(axis),
        view=name,
    )


def _largest(volume_CDHW: Tensor, dim: int, shown: tuple[float, float]) -> Tensor:
    """The largest value along a dim, as bytes."""
    slabs = [as_bytes(slab, shown).amax(dim) for slab in volume_CDHW.split(_PLANES, dim)]
    return torch.stack(slabs).amax(0).cpu()
