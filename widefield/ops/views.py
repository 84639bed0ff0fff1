"""Views that permute, add, remove or expand dims, or reinterpret a dtype; and new_zeros and the like.

A view of a tiled tensor shares the tile's memory, so in-place writes to it reach the tensor.  Where pixels must move first, as
for a cut dim that is removed, the view is a copy, and in-place writes to it are written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Cuts, Layout, layout_of, uncut
from widefield.private_torch.tensors import is_view
from widefield.rules import Local, Meta, case, composed, rule
from widefield.tiled.dispatch import by_rule
from widefield.tiled.tensor import TiledTensor, swap, wrap_view
from widefield.tiled.view_writeback import ViewWriteback, version_of

aten = torch.ops.aten


def with_whole(x: Meta, dims: Sequence[int]) -> Layout:
    """The layout of a tensor with `dims` uncut, whose cuts are gathered and do not move to other dims."""
    assert x.layout is not None, "a view of a plain tensor is plain"
    return layout_of(x.shape, tuple(None if dim in dims else cut for dim, cut in enumerate(x.cuts)), x.layout.grid)


def view_rule(x: Meta, outs: Sequence[tuple[tuple[int, ...], Cuts]], run: Any, gather: Sequence[int] = ()) -> Local:
    """The rule of a view: `run` of the tile gives the outputs, of these shapes and cuts; gather: dims that must be whole."""
    return Local([x], lambda _: outs, lambda _, tile: run(tile), layouts=[with_whole(x, gather)], is_view=True)


# ---------------------------------------------------------------------------------------------- the order of dims


@rule(aten.permute.default)
def permute(x: Meta, dims: Sequence[int]) -> Local:
    order = [dim % x.ndim for dim in dims]
    out = tuple(x.shape[dim] for dim in order), tuple(x.cuts[dim] for dim in order)
    return view_rule(x, [out], lambda tile: tile.permute(order))


@rule(aten.transpose.int)
def transpose(x: Meta, a: int, b: int) -> Local:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@rule(aten.t.default)
def t(x: Meta) -> Local:
    return permute(x, range(x.ndim)[::-1])


@rule(aten.unsqueeze.default)
def unsqueeze(x: Meta, dim: int) -> Local:
    dim %= x.ndim + 1
    out = (*x.shape[:dim], 1, *x.shape[dim:]), (*x.cuts[:dim], None, *x.cuts[dim:])
    return view_rule(x, [out], lambda tile: tile.unsqueeze(dim))


@rule(aten.squeeze.default)
def squeeze(x: Meta) -> Local:
    return squeeze_dims(x, range(x.ndim))


@rule(aten.squeeze.dim)
def squeeze_dim(x: Meta, dim: int) -> Local:
    return squeeze_dims(x, [dim])


@rule(aten.squeeze.dims)
def squeeze_dims(x: Meta, dims: Sequence[int]) -> Local:
    squeezed = [dim % x.ndim for dim in dims if x.shape[dim] == 1]
    left = [dim for dim in range(x.ndim) if dim not in squeezed]
    out = tuple(x.shape[dim] for dim in left), tuple(x.cuts[dim] for dim in left)
    return view_rule(x, [out], lambda tile: tile.squeeze(squeezed), gather=squeezed)


@rule(aten.expand.default)
def expand(x: Meta, size: Sequence[int], implicit: bool = False) -> Local:
    new = len(size) - x.ndim
    shape = tuple(x.shape[n - new] if extent == -1 else extent for n, extent in enumerate(size))
    expanded = [dim for dim in range(x.ndim) if x.shape[dim] != shape[dim + new]]
    cuts = (None,) * new + with_whole(x, expanded).cuts
    tile_shape = layout_of(shape, cuts, x.layout.grid).tile_shape  # type: ignore[union-attr]
    return view_rule(x, [(shape, cuts)], lambda tile: tile.expand(tile_shape), gather=expanded)


# ---------------------------------------------------------------------------------------------- new_zeros and the like


def _new(function: Any) -> Any:
    def new(x: Meta, size: Sequence[int], *values: Any, **kwargs: Any) -> Local:
        shape = tuple(size)
        fits = len(shape) == x.ndim and all(cut is None or shape[dim] == x.shape[dim] for dim, cut in enumerate(x.cuts))
        cuts = x.cuts if fits else (None,) * len(shape)
        tile_shape = layout_of(shape, cuts, x.layout.grid).tile_shape  # type: ignore[union-attr]
        return Local([x], lambda _: [(shape, cuts)], lambda _, tile: function(tile, tile_shape, *values, **kwargs))

    return new


for _operation in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default):
    rule(_operation)(_new(_operation))


@rule(aten.new_empty_strided.default)
def new_empty_strided(x: Meta, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Local:
    return _new(aten.new_empty.default)(x, size, **kwargs)


# ---------------------------------------------------------------------------------------------- refusals


@composed(aten.as_strided.default)
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """The tensor itself, where size and strides are its own, as some of torch's operations ask; else refused."""
    return x.view_as(x) if _is_same_view(x, size, stride, offset) else _refuse(x)


@composed(aten.as_strided_.default)
def as_strided_(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return x if _is_same_view(x, size, stride, offset) else _refuse(x)


def _is_same_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    """Whether a tensor has this size and these strides, on dims longer than one."""
    same = [extent < 2 or ours == step for extent, ours, step in zip(x.shape, x.stride(), stride, strict=False)]
    return tuple(size) == tuple(x.shape) and all(same) and not offset


@composed(aten.as_strided_scatter.default, aten.as_strided_copy.default)
def _refuse(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(
        "as_strided addresses places in memory, which an image cut into tiles does not have; use slices or views"
    )


_IN_PLACE = {
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
}


def _view_in_place(operation: Any) -> Any:
    def changed(x: TiledTensor, *args: Any) -> Tensor:
        if x.has_views and x.requires_grad and torch.is_grad_enabled() and not is_view(x):
            raise NotImplementedError(
                f"the dims of a tensor in tiles, of shape {list(x.shape)}, cannot be changed in place once views of it were "
                "taken, whose gradients would take the old dims for the new; use the operation that gives a new tensor"
            )
        had_views, made = x.has_views, operation(x, *args)
        x.has_views = had_views  # the operation's own view is not one that remains
        return swap(x, made if type(made) is TiledTensor else wrap_view(made, uncut((), x.tile_layout.grid)))

    return changed


for _in_place, _operation in _IN_PLACE.items():
    composed(_in_place, uncut_too=True)(_view_in_place(_operation))


@composed(aten.view.dtype)
def view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize != x.element_size():
        raise NotImplementedError(
            f"{x.dtype} of {x.element_size()} bytes seen as {dtype} of {dtype.itemsize} would change the shape of an image cut "
            "into tiles; take widefield.whole(x) before it"
        )
    return by_rule(_view_as, aten.view.dtype, (x, dtype), {})


def _view_as(x: Meta, dtype: torch.dtype) -> Local:
    return view_rule(x, [(x.shape, x.cuts)], lambda tile: tile.view(dtype))


# ---------------------------------------------------------------------------------------------- complex numbers


def _resolved(x: TiledTensor, *, lazy: Any, now: Any) -> Tensor:
    """The conjugate or the negative, of which torch makes a lazy view: a flag for the next operation.

    Below autograd that flag is not read, so it is computed now, as a copy whose in-place writes are written back.
    """
    if x.writeback is not None:
        x.writeback.refresh(version_of(x))
    made = wrap_view(now(x.local), x.tile_layout, x.stride())
    made.writeback, made.may_alias_data = (
        ViewWriteback(x, x.tile_layout, lambda _, tile: lazy(tile), 0, made.local),
        x.may_alias_data,
    )
    x.has_views = True
    return made


composed(aten._conj.default, uncut_too=True)(partial(_resolved, lazy=aten._conj.default, now=aten.conj_physical.default))
composed(aten._neg_view.default, uncut_too=True)(partial(_resolved, lazy=aten._neg_view.default, now=aten.neg.default))


@rule(aten.view_as_real.default)
def view_as_real(x: Meta) -> Local:
    return view_rule(x, [((*x.shape, 2), (*x.cuts, None))], torch.view_as_real)


@rule(aten.view_as_complex.default)
def view_as_complex(x: Meta) -> Local:
    def run(tile: Tensor) -> Tensor:
        steps = tile.stride()
        fits = steps[-1] == 1 and all(step % 2 == 0 for step in steps[:-1])
        return torch.view_as_complex(tile if fits else tile.contiguous())

    if not x.ndim or x.shape[-1] != 2:
        raise ValueError(f"view_as_complex wants a last dim of 2, the real and the imaginary part, and not {list(x.shape)}")
    return view_rule(x, [(x.shape[:-1], x.cuts[:-1])], run, gather=[x.ndim - 1])


# ---------------------------------------------------------------------------------------------- cases

_IMAGE = (2, 3, 11, 7)

CASES = [
    case("permute", lambda x: x.permute(0, 2, 3, 1).sin(), _IMAGE),
    case("permute and back", lambda x: x.permute(0, 2, 3, 1).exp().permute(0, 3, 1, 2), _IMAGE),
    case("transpose, movedim, mT, t", lambda x: [x.transpose(1, -1), x.movedim(1, -1), x.mT, x[0, 0].t()], _IMAGE),
    case("3-D permute", lambda x: x.permute(0, 4, 2, 1, 3).cos(), (2, 3, 5, 4, 7)),
    case("unsqueeze and squeeze", lambda x: x.unsqueeze(2).exp().squeeze(2) * x.unsqueeze(-1).squeeze(), _IMAGE),
    case("squeeze of a cut dim", lambda x: [x.squeeze(2).exp(), x.squeeze()], (2, 3, 1, 7)),
    case("squeeze of several dims", lambda x: x.squeeze((1, 2, 3)).sin(), (2, 1, 1, 7)),
    case("expand", lambda x: x.expand(4, -1, 3, -1, -1).sin(), (2 - 1, 3, 11, 7)),
    case("expand of a cut dim of one", lambda x: x.expand(2, 3, 5, 7).sin(), (2, 3, 1, 7)),
    case("expand_as", lambda x, y: x[:, :1].expand_as(y) * y, _IMAGE, _IMAGE, tiled=(0, 1)),
    case("written to a permuted view", lambda x: (y := x * 1, y.permute(0, 2, 3, 1).unsqueeze(1).mul_(2), y * y)[-1], _IMAGE),
    case(
        "new tensors",
        lambda x: [x.new_zeros(2, 5, 11, 7) + x[:, :1], x.new_ones(11, 7) * x, x.new_full((2, 3, 11, 7), 3.0) * x],
        _IMAGE,
    ),
    case("seen as integers", lambda x: x.detach().view(torch.int64) >> 1, _IMAGE),
    case("seen as bytes", lambda x: x.detach().view(torch.uint8), _IMAGE, refuses="would change the shape"),
    case("as_strided to what it is", lambda x: x.exp().as_strided(x.shape, x.stride()) ** 2, _IMAGE),
    case("as_strided", lambda x: x.as_strided((2, 3), (1, 1)), _IMAGE, refuses="places in memory"),
    case("as_strided in place to what it is", lambda x: (y := x * 2).as_strided_(y.shape, y.stride()) ** 2, _IMAGE),
    case("as_strided in place", lambda x: (x * 2).as_strided_((2, 3), (1, 1)), _IMAGE, refuses="places in memory"),
    case("unsqueezed in place", lambda x: (x * 1).unsqueeze_(0).sin(), _IMAGE),
    case("sum unsqueezed in place", lambda x: x * x.sum((2, 3)).unsqueeze_(-1).unsqueeze_(2), _IMAGE),
    case("squeezed and transposed in place", lambda x: x[:, :1].mul(2).squeeze_(1).transpose_(1, 2).sin(), _IMAGE),
]
