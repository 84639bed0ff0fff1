"""Indexing by tensors: index, index_put, index_select and the like.

Indexed dims must be whole: a cut there moves to another dim.  Index tensors must be the same on every rank, except where pixels
index a table that every rank has whole.  How many pixels a boolean mask picks depends on all tiles, so a mask that is cut may
set pixels but not pick them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Cut, Cuts, Layout, layout_of
from widefield.rules import Local, Meta, case, composed
from widefield.tiled.dispatch import any_cut, by_rule
from widefield.tiled.redistribute import local_of, move_cuts, whole_of
from widefield.tiled.tensor import TiledTensor

aten = torch.ops.aten

COUNTED = (
    "how many pixels it gives depends on the values in all tiles; weigh pixels with torch.where or masked_fill instead of "
    "picking them, or take widefield.whole(x) before it"
)


def _plain_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Index tensors as plain tensors of integers, the same on every rank.  NotImplementedError: a mask that is cut."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if any_cut(index):
                raise NotImplementedError(
                    f"a mask of shape {list(index.shape)} that is cut into tiles cannot pick pixels: {COUNTED}"
                )
            found += (whole_of(index) if type(index) is TiledTensor else index).nonzero().unbind(1)
        else:
            found.append(whole_of(index) if type(index) is TiledTensor else index)
    return found


def _indexed(indices: Sequence[Any]) -> list[int]:
    """The dims that are indexed."""
    return [dim for dim, index in enumerate(indices) if index is not None]


def _picked(
    shape: Sequence[int], cuts: Cuts, indices: Sequence[Any], index_cuts: Cuts | None = None
) -> tuple[tuple[int, ...], Cuts]:
    """Shape and cuts of a tensor's pixels at `indices`; index_cuts: the cuts of the index tensors' broadcast shape."""
    dims = _indexed(indices)
    together = tuple(torch.broadcast_shapes(*(indices[dim].shape for dim in dims)))
    rest = [(extent, cut) for dim, (extent, cut) in enumerate(zip(shape, cuts, strict=True)) if dim not in dims]
    place = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest[place:place] = zip(together, index_cuts or (None,) * len(together), strict=True)
    return tuple(extent for extent, _ in rest), tuple(cut for _, cut in rest)


def _filled(indices: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The list of indices with `tensors`, in order, in place of its Metas."""
    following = iter(tensors)
    return [None if index is None else next(following) for index in indices]


# ---------------------------------------------------------------------------------------------- index


@composed(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if not any_cut(x) and not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        # Adding zeros broadcasts the index tensors to one shape and cuts them like the first that is cut.
        first = next(i for i in indices if any_cut(i))
        zeros = sum((aten.mul.Scalar(i, 0) for i in indices if i is not None and i is not first), aten.mul.Scalar(first, 0))
        return by_rule(
            _index_of_pixels, aten.index.Tensor, (x, [i if i is None else aten.add.Tensor(i, zeros) for i in indices]), {}
        )
    return by_rule(_index, aten._unsafe_index.Tensor, (x, _plain_indices(indices)), {})


def _index(x: Meta, indices: Sequence[Meta | None]) -> Local:
    def run(_: Layout, tile: Tensor, *picks: Tensor) -> Tensor:
        return aten.index.Tensor(tile, _filled(indices, picks))

    return Local([x], lambda layout: [_picked(x.shape, layout.cuts, indices)], run, whole=_indexed(indices))


def _index_of_pixels(x: Meta, indices: Sequence[Meta | None]) -> Local:
    """Every pixel of the index tensors picks from `x`, which every rank has whole."""
    picks = [meta for meta in indices if meta is not None]
    layout = picks[0].layout
    assert layout is not None, "index tensors of one shape are cut alike"

    def run(_: Layout, table: Tensor, *tiles: Tensor) -> Tensor:
        return aten.index.Tensor(table, _filled(indices, tiles))

    outs = _picked(x.shape, (None,) * x.ndim, indices, layout.cuts)
    return Local([*picks, x], lambda _: [outs], run, layouts=[*[layout] * len(picks), None])


def _of_a_number(operation: Any) -> Any:
    """Register the rule of an operation; a tensor of no dims, which torch indexes like one of a single element, runs whole."""

    def register(function: Any) -> Any:
        @composed(operation)
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x.ndim:
                return function(x, *args, **kwargs)
            return operation(*(whole_of(arg) if type(arg) is TiledTensor else arg for arg in (x, *args)), **kwargs)

        return run

    return register


@_of_a_number(aten.index_select.default)
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    out = aten.index.Tensor(x, _at_dim(x, dim, index))
    if local_of(out).is_contiguous():
        return out
    return aten.clone.default(out, memory_format=torch.contiguous_format)  # row-major, as torch's result is


def _at_dim(x: Tensor, dim: int, index: Tensor) -> list[Tensor | None]:
    """The indices, one per dim, that index along `dim`."""
    return [None] * (dim % x.ndim) + [aten.view.default(index, [-1])]


# ---------------------------------------------------------------------------------------------- index_put


@composed(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype is torch.bool and values.numel() == 1:
        mask_of_pixels = aten.view.default(mask, [*mask.shape, *[1] * (x.ndim - mask.ndim)])
        value = aten.view.default(values, []).to(x.dtype)
        return aten.where.self(mask_of_pixels, aten.add.Tensor(x, value) if accumulate else value, x)
    plain = _plain_indices(indices)
    if not any_cut(x, values):  # the indices were cut
        values = whole_of(values) if type(values) is TiledTensor else values
        return aten.index_put.default(whole_of(x) if type(x) is TiledTensor else x, plain, values, accumulate)
    return by_rule(_index_put, aten._unsafe_index_put.default, (x, plain, values, accumulate), {})


def _index_put(x: Meta, indices: Sequence[Meta | None], values: Meta, accumulate: bool) -> Local:
    grid = next(meta.layout.grid for meta in (x, values) if meta.is_cut)  # type: ignore[union-attr]
    layout = move_cuts(x.layout, _indexed(indices)) if x.is_cut else layout_of(x.shape, _cuts_around(x, indices, values), grid)  # type: ignore
    shape, cuts = _picked(x.shape, layout.cuts, indices)
    missing = len(shape) - values.ndim
    fits = [
        cut if extent == whole else None
        for extent, whole, cut in zip(values.shape, shape[missing:], cuts[missing:], strict=True)
    ]
    of_values = layout_of(values.shape, tuple(fits), grid)

    def run(_: Layout, tile: Tensor, *others: Tensor) -> Tensor:
        return aten.index_put.default(tile, _filled(indices, others[:-1]), others[-1], accumulate)

    return Local([x, values], lambda _: [(x.shape, layout.cuts)], run, layouts=[layout, of_values])


def _cuts_around(x: Meta, indices: Sequence[Meta | None], values: Meta) -> Cuts:
    """Cuts for the dims of an uncut tensor that are not indexed, like those of the values put there."""
    names = tuple(Cut((), (dim,)) for dim in range(x.ndim))  # a dim's number in place of a cut, to find it among the values
    shape, places = _picked(x.shape, names, indices)
    cuts: list[Cut | None] = [None] * x.ndim
    missing = len(shape) - values.ndim
    for dim, (place, extent) in enumerate(zip(places, shape, strict=True)):
        if place is not None and dim >= missing and values.shape[dim - missing] == extent:
            cuts[place.bounds[0]] = values.cuts[dim - missing]
    return tuple(cuts)


@_of_a_number(aten.index_add.default)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    source = source if alpha == 1 else aten.mul.Tensor(source, alpha)
    return aten.index_put.default(x, _at_dim(x, dim, index), source, True)


@_of_a_number(aten.index_copy.default)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return aten.index_put.default(x, _at_dim(x, dim, index), source)


@_of_a_number(aten.index_fill.int_Scalar)
def index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return aten.index_put.default(x, _at_dim(x, dim, index), torch.full((), value, dtype=x.dtype, device=x.device))


@_of_a_number(aten.index_fill.int_Tensor)
def index_fill_tensor(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    return aten.index_put.default(x, _at_dim(x, dim, index), value.to(x.dtype))


# ---------------------------------------------------------------------------------------------- in place


def in_place(operation: Any) -> Any:
    """The in-place variant of an operation: it copies the operation's result into the first argument."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return aten.copy_.default(x, operation(x, *args, **kwargs))

    return write


for _written, _operation in {
    aten.index_put_.default: aten.index_put.default,
    aten.index_add_.default: aten.index_add.default,
    aten.index_copy_.default: aten.index_copy.default,
    aten.index_fill_.int_Scalar: aten.index_fill.int_Scalar,
    aten.index_fill_.int_Tensor: aten.index_fill.int_Tensor,
}.items():
    composed(_written)(in_place(_operation))


@composed(aten._index_put_impl_.default)
def index_put_impl(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    return aten.copy_.default(x, aten.index_put.default(x, indices, values, accumulate))


# ---------------------------------------------------------------------------------------------- refusals


@composed(
    aten.masked_select.default, aten.nonzero.default, aten.nonzero_static.default, aten.masked_scatter.default,
    aten.masked_scatter_.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.argwhere.default,
)  # fmt: skip
def refuse_counted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(f"this cannot run on an image of shape {list(x.shape)} that is cut into tiles: {COUNTED}")


# ---------------------------------------------------------------------------------------------- cases


def labels(x: Tensor, count: int) -> Tensor:
    """Integers below `count`, computed from an image."""
    return (x.detach() * 7).floor().long() % count


def _set(where: Any, value: Any = 0.5) -> Any:
    """A case: write at the index that `where` computes from the tensor; the result is the tensor's square."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 1
        y[where(y)] = others[0] if others else value
        return y * y

    return run


_IMAGE = (2, 3, 11, 7)
_ALL = slice(None)

CASES = [
    case(
        "index of channels", lambda x: [x[:, [2, 0, 0]] ** 2, x[[1, 1, 0]], x[:, torch.tensor([[0, 1], [2, 2]])].sin()], _IMAGE
    ),
    case("index of a cut dim", lambda x: [x[:, :, [9, 0, 4, 4]] ** 2, x[:, :, :, [6, 1]].sin()], _IMAGE),
    case(
        "index of two dims", lambda x: [x[[0, 1], [2, 1]] ** 2, x[:, [0, 1], :, [2, 6]], x[..., [1, 10], [0, 3]].sin()], _IMAGE
    ),
    case("index by a mask of channels", lambda x: x[:, torch.tensor([True, False, True])] ** 2, _IMAGE),
    case("index by a plain mask", lambda x, m: x[m > 0] ** 2, _IMAGE, (2, 3)),
    case("index by a plain mask of pixels", lambda x, m: x[:, :, m > 0] ** 2, _IMAGE, (11, 7)),
    case("index by tiled integers, uncut", lambda x: x[:, labels(x.sum((2, 3)), 3)[0]] ** 2, _IMAGE),
    case("index by tiled integers, cut", lambda x: x[:, :, labels(x[0, 0, :, 0], 11)] ** 2, _IMAGE),
    case(
        "a table indexed by pixels",
        lambda x, t: [t.detach()[labels(x, 5)] * x[..., None], t.detach()[labels(x, 5), labels(x[:, :1], 4)]],
        _IMAGE,
        (5, 4),
    ),
    case("a table indexed by pixels, with gradient", lambda x, t: t[labels(x, 5)] * x[..., None], _IMAGE, (5, 4)),
    case(
        "index_select",
        lambda x: [x.index_select(1, torch.tensor([2, 0])) ** 2, x.index_select(2, torch.tensor([3, 3, 8])).sin()],
        _IMAGE,
    ),
    case(
        "index_add, copy, fill",
        lambda x, y: [
            x.index_add(1, torch.tensor([2, 2]), y, alpha=3),
            x.index_copy(1, torch.tensor([2, 0]), y),
            x.index_fill(1, torch.tensor([1]), 5.0),
            x.index_fill(2, torch.tensor([1, 8]), 5.0) ** 2,
        ],
        _IMAGE,
        (2, 2, 11, 7),
        tiled=(0, 1),
    ),
    case("index_add of rows", lambda x, y: x.index_add(2, torch.tensor([2, 9, 2]), y) ** 2, _IMAGE, (2, 3, 3, 7), tiled=(0, 1)),
    case(
        "index_put",
        lambda x, y: x.index_put((torch.tensor([1, 0]), torch.tensor([2, 2])), y, accumulate=True) ** 2,
        _IMAGE,
        (2, 11, 7),
    ),
    case(
        "index_put of tiles",
        lambda x, y: x.index_put((torch.tensor([1, 0]), torch.tensor([2, 2])), y[:, 0]) ** 2,
        _IMAGE,
        _IMAGE,
        tiled=(0, 1),
    ),
    case(
        "index_put to a plain tensor",
        lambda x, y: y.index_put((torch.tensor([1, 0]), torch.tensor([2, 2])), x[:, 0]) ** 2,
        _IMAGE,
        _IMAGE,
    ),
    case("set where a mask is", _set(lambda y: y.detach() > 0.3), _IMAGE),
    case("set where a mask of samples is", _set(lambda y: torch.tensor([True, False]), 3.0), _IMAGE),
    case("set channels", _set(lambda y: (_ALL, [0, 2])), _IMAGE),
    case("set channels to an image", _set(lambda y: (_ALL, [0, 2])), _IMAGE, (2, 2, 11, 7), tiled=(0, 1)),
    case("set rows", _set(lambda y: (_ALL, _ALL, [1, 8])), _IMAGE),
    case("set single pixels", _set(lambda y: (_ALL, _ALL, [1, 8], [0, 5])), _IMAGE, (2, 3, 2)),
    case(
        "written through a view",
        lambda x: (y := x * 1, y[:, 1:, 2:9].index_fill_(1, torch.tensor([0]), 2.0), y * y)[-1],
        _IMAGE,
    ),
    case(
        "indices of a number",
        lambda x, n: [
            n[0].index_select(0, labels(x, 1)),
            n[0].index_add(0, labels(x, 1), x[0], alpha=2),
            n[0].index_fill(0, labels(x, 1), 2.0),
            n[0].index_copy(0, labels(x, 1), n[1]),
            n[0].index_fill(0, labels(x, 1), n.detach()[1]),
        ],
        (1,),
        (2,),
    ),
    case("where there are three", lambda x, y: torch.where(x > 0, x, y[:, :1]), _IMAGE, _IMAGE),
    case("picked by a mask", lambda x: x[x > 0], _IMAGE, refuses="cannot pick pixels"),
    case("masked_select", lambda x: x.masked_select(x > 0), _IMAGE, refuses="depends on the values"),
    case("nonzero", lambda x: x.nonzero(), _IMAGE, refuses="depends on the values"),
    case("unique", lambda x: x.unique(), _IMAGE, refuses="depends on the values"),
    case("unique channels", lambda x: x.unique(dim=1), _IMAGE, refuses="depends on the values"),
    case("unique_consecutive", lambda x: x.unique_consecutive(), _IMAGE, refuses="depends on the values"),
    case("argwhere", lambda x: x.argwhere(), _IMAGE, refuses="depends on the values"),
    case("where one is", lambda x: torch.where(x > 0), _IMAGE, refuses="depends on the values"),
    case("masked_scatter", lambda x, y: x.masked_scatter(x > 0, y), _IMAGE, (500,), refuses="depends on the values"),
    case("histogram", lambda x: x.histc(5, -1, 1), _IMAGE, refuses="aten.histc.default cannot run.*Write it with"),
    case("counts", lambda x: labels(x, 5).bincount(), (13,), refuses="aten.bincount.default cannot run"),
]
