"""Cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from widefield.ops.reductions import WIDE, ranks_along
from widefield.rules import Description, Local, Meta, Reduced, Tile, case, rule

aten = torch.ops.aten


def _running(image: Meta, dim: int, *, dtype=None, op=aten.cumsum.default, is_sum=True) -> Description:
    """Each tile's own cumulative sum, plus the sums of the tiles before it; for products accordingly."""
    dim %= max(1, image.ndim)
    layout, run = image.layout, partial(op, dim=dim, dtype=dtype)
    assert layout is not None
    if layout.cuts[dim] is None:
        return Local([image], lambda layout: [(layout.shape, layout.cuts)], lambda _, tile: run(tile))
    here = layout.box[dim]
    ranks = ranks_along(layout, [dim])
    before = [n for n, rank in enumerate(ranks) if rank != layout.grid.index and layout.boxes[rank][dim].stop <= here.start]
    whole = torch.sum if is_sum else torch.prod

    def finish(parts: Tensor, tile: Tensor) -> Tensor:
        own, others = run(tile), whole(parts[before], 0)
        return (own + others if is_sum else own * others).to(own.dtype)

    local = partial(_total_of_tile, dim=dim, op=whole, dtype=dtype)
    out = Tile(image.shape, layout.cuts)
    return Reduced([image], [dim], local, [out], lambda parts: parts, finish, by_parts=False)  # it is per tile


def _total_of_tile(tile: Tensor, *, dim: int, op: Callable, dtype: torch.dtype | None) -> Tensor:
    out = dtype or (tile.dtype if tile.dtype.is_floating_point or tile.dtype.is_complex else torch.int64)
    return op(tile, dim, keepdim=True, dtype=WIDE.get(out, out))


rule(aten.cumsum.default)(_running)
rule(aten.cumprod.default)(partial(_running, op=aten.cumprod.default, is_sum=False))


_X = (2, 3, 11, 7)
CASES = [
    case("running sums", lambda x: [x.cumsum(d) for d in range(4)], _X),
    case("running sum of truths", lambda x: (x > 0).cumsum(2), _X),
    case("running products", lambda x: [x.cumprod(d) for d in range(4)], _X),
    case("running sum of a line", lambda x: x.cumsum(0), (11,)),
]
