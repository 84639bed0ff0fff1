"""Extremes and their indices, and operations that sort: max, argmax, sort, topk, median and the like.

Over cut dims each tile sends its extreme and that one's index in the whole, in one small message.  Of equal extremes the first
in the whole wins, as on one device.  Operations that sort need the dim whole: a cut there moves to another dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from widefield.geometry.box import Box
from widefield.geometry.layout import Layout
from widefield.ops.reductions import dims_of, reduced, shrunk
from widefield.rules import Description, Local, Meta, Reduced, Tile, case, rule

aten = torch.ops.aten
_NO_PLACE = 2**53
"""The index of an empty tile's extreme: above all others, and exact in float64."""


def _limit(dtype: torch.dtype, is_max: bool) -> float:
    """The value of `dtype` that no other is less extreme than."""
    if dtype.is_floating_point:
        return -math.inf if is_max else math.inf
    if dtype is torch.bool:
        return not is_max
    return torch.iinfo(dtype).min if is_max else torch.iinfo(dtype).max


def _extreme(image: Meta, dim=None, keepdim=False, *, is_max: bool) -> Description:
    dims = dims_of(image, dim)
    op = partial(aten.amax.default if is_max else aten.amin.default, keepdim=keepdim)

    def local(tile: Tensor) -> Tensor:
        if all(tile.shape[d] for d in dims):
            return op(tile, dims)
        return torch.full_like(tile.sum(dims, keepdim), _limit(tile.dtype, is_max), dtype=tile.dtype)

    def merge(parts: Tensor) -> Tensor:
        return parts.amax(0) if is_max else parts.amin(0)

    # Equal extremes share the gradient, and a tile's part does not say how many it has.
    return reduced(image, dims, keepdim, local, plain=local, merge=merge, by_parts=False)


rule(aten.amax.default, aten.max.default)(partial(_extreme, is_max=True))
rule(aten.amin.default, aten.min.default)(partial(_extreme, is_max=False))


@rule(aten.aminmax.default)
def aminmax(image: Meta, *, dim=None, keepdim=False) -> Description:
    dims = dims_of(image, dim)

    def local(tile: Tensor) -> Tensor:
        if all(tile.shape[d] for d in dims):
            return torch.stack([aten.amin.default(tile, dims, keepdim), aten.amax.default(tile, dims, keepdim)])
        nothing = tile.sum(dims, keepdim)
        least, most = (torch.full_like(nothing, _limit(tile.dtype, is_max), dtype=tile.dtype) for is_max in (False, True))
        return torch.stack([least, most])

    def merge(parts: Tensor) -> Tensor:
        return torch.stack([parts[:, 0].amin(0), parts[:, 1].amax(0)])

    def plain(tile: Tensor) -> tuple[Tensor, ...]:
        return tuple(local(tile).unbind(0))

    def finish(total: Tensor, *_) -> tuple[Tensor, ...]:
        return tuple(total.unbind(0))

    return reduced(image, dims, keepdim, local, plain=plain, merge=merge, finish=finish, outs=2, by_parts=False)  # as amax


# ---------------------------------------------------------------------------------------------- extremes and their indices


def _indexed_extreme(image: Meta, dims: Sequence[int], keepdim: bool, is_max: bool, finish: Callable, outs: int) -> Description:
    """The rule of an extreme and its index over cut dims; finish(values, indices) returns the outputs.

    Both are sent as one tensor: float64 for floating point, where indices are exact up to 2^53, else int64.
    """
    layout = image.layout
    assert layout is not None
    packed = torch.float64 if image.dtype.is_floating_point else torch.int64

    def local(tile: Tensor) -> Tensor:
        tile = tile.to(packed)
        if not all(tile.shape[d] for d in dims):
            nothing = tile.sum(dims, keepdim)
            return torch.stack([torch.full_like(nothing, _limit(packed, is_max)), torch.full_like(nothing, _NO_PLACE)])
        value, place = _extreme_of(tile, dims, keepdim, is_max)
        return torch.stack([value, _in_whole(place, layout.box, layout.shape, dims).to(packed)])

    def merge(parts: Tensor) -> Tensor:
        values, places = parts[:, 0], parts[:, 1]
        best = values.amax(0) if is_max else values.amin(0)
        ties = (values == best) | (values != values)  # a NaN wins
        first = places.masked_fill(~ties, _NO_PLACE).argmin(0)
        return parts.gather(0, first.expand(1, 2, *first.shape))[0]  # so that the gradient goes to that pixel alone

    def finished(total: Tensor, *_) -> Tensor | tuple:
        return finish(total[0].to(image.dtype), total[1].to(torch.int64))

    tile = Tile(*shrunk(layout, dims, keepdim))
    return Reduced([image], dims, local, [tile] * outs, merge, finished)


def _extreme_of(tile: Tensor, dims: Sequence[int], keepdim: bool, is_max: bool) -> tuple[Tensor, Tensor]:
    """Values and their row-major indices in the tile, over one dim or over all."""
    pick = torch.argmax if is_max else torch.argmin
    if len(dims) == 1:
        place = pick(tile, dims[0], keepdim=True)
        value = tile.gather(dims[0], place)
        return (value, place) if keepdim else (value.squeeze(dims[0]), place.squeeze(dims[0]))
    place = pick(tile)
    value = tile.reshape(-1)[place]
    shape = [1] * tile.ndim if keepdim else []
    return value.view(shape), place.view(shape)


def _in_whole(place: Tensor, box: Box, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Row-major indices in a tile as row-major indices in the whole, both over `dims`."""
    whole, step = torch.zeros_like(place), 1
    for d in reversed(dims):
        whole += (place % len(box[d]) + box[d].start) * step
        place = place // len(box[d])
        step *= shape[d]
    return whole


def _extreme_along(image: Meta, dim: int, keepdim=False, *, is_max: bool) -> Description:
    dim %= max(1, image.ndim)
    op = aten.max.dim if is_max else aten.min.dim
    if image.cuts[dim] is None:
        return reduced(image, [dim], keepdim, _never, plain=partial(op, dim=dim, keepdim=keepdim), outs=2)
    return _indexed_extreme(image, [dim], keepdim, is_max, lambda values, places: (values, places), 2)


def _never(tile: Tensor) -> Tensor:
    raise AssertionError("a dim without a cut is reduced by each tile on its own")


rule(aten.max.dim)(partial(_extreme_along, is_max=True))
rule(aten.min.dim)(partial(_extreme_along, is_max=False))


def _place_of_extreme(image: Meta, dim: int | None = None, keepdim=False, *, is_max: bool) -> Description:
    dims = dims_of(image, dim)
    op = aten.argmax.default if is_max else aten.argmin.default
    if all(image.cuts[d] is None for d in dims):
        return reduced(image, dims, keepdim, _never, plain=partial(op, dim=dim, keepdim=keepdim))
    return _indexed_extreme(image, dims, keepdim, is_max, lambda _, places: places, 1)


rule(aten.argmax.default)(partial(_place_of_extreme, is_max=True))
rule(aten.argmin.default)(partial(_place_of_extreme, is_max=False))


# ---------------------------------------------------------------------------------------------- sorting


def _ordered(image: Meta, dim: int, run: Callable, extent: int | None = None, outs: int = 2) -> Description:
    """The rule of run(tile), which needs `dim` whole and changes no other dim; extent: the output's along `dim`."""
    dim %= max(1, image.ndim)

    def shapes(layout: Layout) -> list:
        shape = list(layout.shape)
        shape[dim] = shape[dim] if extent is None else extent
        return [(tuple(shape), layout.cuts)] * outs

    return Local([image], shapes, lambda _, tile: run(tile), whole=[dim])


@rule(aten.sort.default)
def sort(image: Meta, dim=-1, descending=False) -> Description:
    return _ordered(image, dim, lambda tile: aten.sort.default(tile, dim, descending))


@rule(aten.sort.stable)
def sort_stable(image: Meta, *, stable, dim=-1, descending=False) -> Description:
    return _ordered(image, dim, lambda tile: aten.sort.stable(tile, stable=stable, dim=dim, descending=descending))


@rule(aten.topk.default)
def topk(image: Meta, k, dim=-1, largest=True, sorted=True) -> Description:
    return _ordered(image, dim, lambda tile: aten.topk.default(tile, k, dim, largest, sorted), extent=k)


def _picked(image: Meta, dim: int, keepdim: bool, run: Callable) -> Description:
    dim %= max(1, image.ndim)
    return Local([image], lambda layout: [shrunk(layout, [dim], keepdim)] * 2, lambda _, tile: run(tile), whole=[dim])


@rule(aten.kthvalue.default)
def kthvalue(image: Meta, k, dim=-1, keepdim=False) -> Description:
    return _picked(image, dim, keepdim, lambda tile: aten.kthvalue.default(tile, k, dim, keepdim))


def _pick_along(image: Meta, dim: int = -1, keepdim=False, *, op: Callable) -> Description:
    return _picked(image, dim, keepdim, lambda tile: op(tile, dim, keepdim))


for operation in (aten.mode.default, aten.median.dim, aten.nanmedian.dim):
    rule(operation)(partial(_pick_along, op=operation))


def _middle(image: Meta, *, op: Callable) -> Description:
    """The median of all pixels, which are gathered on every rank."""
    return Local([image], lambda _: [((), None)], lambda _, tile: op(tile), whole=range(image.ndim))


for operation in (aten.median.default, aten.nanmedian.default):
    rule(operation)(partial(_middle, op=operation))


def _cumulative(image: Meta, dim: int, *, op: Callable, outs: int) -> Description:
    return _ordered(image, dim, lambda tile: op(tile, dim), outs=outs)


rule(aten.cummax.default)(partial(_cumulative, op=aten.cummax.default, outs=2))
rule(aten.cummin.default)(partial(_cumulative, op=aten.cummin.default, outs=2))
rule(aten.logcumsumexp.default)(partial(_cumulative, op=aten.logcumsumexp.default, outs=1))


def _coarse(x: Tensor) -> Tensor:
    """x rounded, and so with many equal values."""
    return x.detach().round()


_X = (2, 3, 11, 7)
CASES = [
    case("amax over pixels", lambda x: x.amax((2, 3)), _X),
    case("amin over channels", lambda x: x.amin(1, keepdim=True), _X),
    case("amax of equal ones", lambda x: x.round().amax((0, 2)), _X),
    case("amax of whole numbers", lambda x: ((9 * x).long().amax((2, 3)), (x > 0).amax(2), (9 * x).int().amin(2)), _X),
    case("aminmax", lambda x: (*torch.aminmax(x, dim=2), *torch.aminmax(x), *torch.aminmax(x, dim=1, keepdim=True)), _X),
    case("max and min", lambda x: (x.max(), x.min(), x.amin()), _X),
    case("max with a missing value", lambda x: x.detach().masked_fill(x == x.max(), torch.nan).max().isnan(), _X),
    case("max over rows", lambda x: x.max(2), _X),
    case("min over columns, kept", lambda x: x.min(-1, keepdim=True), _X),
    case("max over channels", lambda x: x.max(1), _X),
    case("places of equal ones", lambda x: [_coarse(x).max(d).indices for d in range(4)], _X),
    case("max of nothing but -inf", lambda x: (x.detach() * 0 - math.inf).max(2).indices, _X),
    case("max of missing values", lambda x: x.detach().masked_fill(x > 1, torch.nan).max(2).indices, _X),
    case("max of whole numbers", lambda x: (9 * x).long().max(2), _X),
    case("argmax", lambda x: (x.argmax(), x.argmin(), x.argmax(2), x.argmin(3, keepdim=True), x.argmax(1)), _X),
    case("argmax of equal ones", lambda x: (_coarse(x).argmax(), _coarse(x).argmin(), _coarse(x).argmin(2)), _X),
    case("argmax of truths", lambda x: ((x > 0).int().argmax(), (x > 0).int().argmax(2)), _X),
    case("argmax, kept", lambda x: x.argmax(None, True), _X),
    case("argmax, 3-D", lambda x: (x.argmax(), x.argmax(2), x.argmax(3)), (2, 3, 9, 7, 5)),
    case("argmax, 1-D", lambda x: (x.argmax(), x.argmax(2)), (2, 3, 11)),
    case("of a matrix", lambda x: (x.amax(1), x.argmax(1), x.argmax(), x.sort(1).indices, *x.max(0)), (6, 11)),
    case("of a line", lambda x: (x.max(), x.argmin(), x.argmax(0), x.median(), x.max(0).indices), (11,)),
    case(
        "with a cut batch",
        lambda x: [f(x.transpose(0, 2)) for f in (torch.argmax, lambda x: x.argmax(0), lambda x: x.amin(1))],
        _X,
    ),
    case("sort", lambda x: x.sort(2), _X),
    case("sort over channels", lambda x: x.sort(1, descending=True), _X),
    case("stable sort", lambda x: torch.sort(_coarse(x), dim=2, stable=True), _X),
    case("argsort", lambda x: x.argsort(2), _X),
    case("topk", lambda x: (*x.topk(2, 2), *x.topk(2, 1, largest=False)), _X),
    case("kthvalue", lambda x: (*x.kthvalue(3, 2), *x.kthvalue(2, 1, keepdim=True)), _X),
    case("median along a dim", lambda x: (*x.median(2), *x.median(1, keepdim=True), *x.nanmedian(3)), _X),
    case("median", lambda x: (x.median(), x.nanmedian()), _X),
    case("mode", lambda x: _coarse(x).mode(2).values, _X),
    case("quantile along a cut dim", lambda x: x.quantile(0.3, dim=2), _X),
    case("running extremes", lambda x: (*x.cummax(2), *x.cummin(1)), _X),
    case("running logsumexp", lambda x: x.logcumsumexp(2), _X),
]
