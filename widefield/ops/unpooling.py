"""Pixels put at flat indices of the whole plane: max unpooling, and the backward of adaptive max pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import size_of
from widefield.geometry.interval import Interval
from widefield.geometry.window import Every
from widefield.rules import LocalBoxes, Meta, Read, Tile, Windowed, case, rule

aten = torch.ops.aten


def _indices_in(flat: Tensor, extents: Sequence[int], write: Sequence[Interval]) -> Tensor:
    """Flat indices into the whole plane as flat indices into the box `write`; the box's size for those outside of it."""
    inside, at, rest = None, None, flat
    for n, to in enumerate(write):
        size = math.prod(extents[n + 1 :])
        place = torch.div(rest, size, rounding_mode="floor")
        rest = rest - place * size
        is_here = (place >= to.start) & (place < to.stop)
        inside = is_here if inside is None else inside & is_here
        at = place - to.start if at is None else at * len(to) + (place - to.start)
    assert inside is not None and at is not None, "a plane without dims"
    return torch.where(inside, at, math.prod(size_of(tuple(write))))


def placed(values: Tensor, flat: Tensor, extents: Sequence[int], write: Sequence[Interval], *, add: bool) -> Tensor:
    """The box `write` with `values` at their indices and zeros elsewhere; values whose index is outside are dropped.

    flat: for each value its flat index into the whole plane, whose size is `extents`.
    add: values at equal indices are added; else one of them is taken.
    """
    dims = len(extents)
    at = _indices_in(flat, extents, write)
    lead, size = values.shape[: values.ndim - dims], size_of(tuple(write))
    count = math.prod(size)
    out = values.new_zeros((*lead, count + 1))  # the last element takes what lies outside
    at, values = at.reshape(*lead, -1), values.reshape(*lead, -1)
    out = out.scatter_add_(-1, at, values) if add else out.scatter_(-1, at, values)
    return out[..., :count].reshape(*lead, *size)


def _max_unpool(dims: int, image: Meta, indices: Meta, output_size, stride=(), padding=()) -> Windowed:
    """An index may point anywhere in the plane, so every rank reads all pooled pixels."""
    extents = list(output_size)
    lead = image.ndim - dims
    reach = {lead + n: Every(extent, extents[n]) for n, extent in enumerate(image.shape[lead:])}
    shape = (*image.shape[:lead], *extents)

    def prepare(part: LocalBoxes):
        write = part.write[lead:]
        return lambda values, flat: placed(values, flat, extents, write, add=False)

    return Windowed([Read(image, reach), Read(indices, reach)], [Tile(shape)], prepare)


rule(aten.max_unpool2d.default)(partial(_max_unpool, 2))
rule(aten.max_unpool3d.default)(partial(_max_unpool, 3))


CASES = [
    case("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(17, 13)), (2, 3, 17, 13)),
    case(
        "unpool, overlapping", lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, 2, 1, return_indices=True), 3, 2, 1), (2, 3, 17, 13)
    ),
    case("unpool 1-D", lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), (2, 3, 26)),
    case("unpool 3-D", lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), (1, 2, 10, 8, 6)),
]
