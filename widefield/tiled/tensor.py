"""TiledTensor: a tensor whose pixels are cut into tiles, one per rank of a grid.

It has the whole's shape, so model code computes sizes as on one device, and holds this rank's tile.  Autograd works on top of
it: it intercepts aten operations, in forward and backward.  Values and gradients are those of a single device.  A tensor is

- tiled: cut over ranks by its layout, or uncut, and then the same on every rank, as sums over pixels are;
- plain: an ordinary tensor, the same on every rank; a sum to a single number is plain, and so a loss is;
- partial, as the gradient of a weight: a rank has the part of its own pixels, times the number of tiles, so that the mean over
  ranks, which data parallelism takes anyway, is the value.  See `partial_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Layout, uncut
from widefield.geometry.strides import strides_like
from widefield.private_torch.autograd import set_view_replay_enabled
from widefield.private_torch.dispatcher import ends_graphs, never_compile
from widefield.private_torch.tensors import disabled_torch_function_impl, make_wrapper_subclass, mark_static


class TiledTensor(Tensor):
    """A tensor of the whole's shape, of which `local` is this rank's tile and `tile_layout` says which part that is.

    `tile` and `from_tile` make one; `whole` returns a plain tensor.
    """

    local: Tensor
    tile_layout: Layout
    """Which rank has which pixels (torch's own `layout` means dense or sparse)."""
    saved_halos: dict
    """Halos that forward operations received, saved for their backwards; only of tensors that need no gradient."""

    writeback: Any = None
    """Of a view that is a copy, or a view of one: keeps it and its source the same after in-place writes; else None."""

    may_alias_data: bool = False
    """Whether it may be the `.data` of another tensor, or a view of such, whose version counter differs from that tensor's."""

    may_overlap: bool = False
    """Whether it is an expanded tensor or a view of one, several of whose elements may share memory."""

    has_views: bool = False
    """Whether views of it were made."""

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if len(types) > 1:
            for kind in types:
                if kind in OTHER_KINDS:
                    return OTHER_KINDS[kind](func, args, kwargs or {})
        if args and type(args[0]) is TiledTensor and args[0].tile_layout.single_rank_layouts is not None:
            return _run_single_rank(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _find(func)
        return handler(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        mark_static(self.local)  # a compiler asks here before it looks at the tile
        return ["local"], self.tile_layout

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], layout: Layout, size: Any, stride: Any) -> TiledTensor:
        return wrap_view(inner["local"], layout, stride)

    def __coerce_same_metadata_as_tangent__(self, layout: Layout, kind: type | None = None) -> Tensor:
        """A gradient as a compiled backward expects it: cut like the forward's output."""
        return (
            _redistribute(self, uncut(self.tile_layout.shape, self.tile_layout.grid))
            if kind is Tensor
            else wrap(_redistribute(self, layout), layout)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TiledTensor({self.tile_layout}, tile={self.local!r})"

    def __deepcopy__(self, memo: dict) -> TiledTensor:
        with torch.no_grad():
            copy = wrap(self.local.clone(), self.tile_layout)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a tensor of shape {list(self.shape)} cut into tiles cannot be pickled or saved; save widefield.whole(it)"
        )


mark_static(TiledTensor)


def wrap(tile: Tensor, layout: Layout) -> TiledTensor:
    """The tiled tensor whose tile on this rank is `tile`; AssertionError: the tile's shape is not the layout's.

    Its strides order the dims like the tile's, for torch decides by strides, as whether a reshape is a view.
    """
    assert tile.shape == layout.tile_shape, f"a tile of {tuple(tile.shape)} for {layout}, which wants {layout.tile_shape}"
    return wrap_view(tile, layout)


@ends_graphs
def wrap_view(tile: Tensor, layout: Layout, strides: tuple[int, ...] | None = None) -> TiledTensor:
    """`wrap` without the check; strides: the whole's, None: in the tile's order."""
    set_view_replay_enabled(True)
    strides = _strides(tile, layout) if strides is None else strides
    made = make_wrapper_subclass(TiledTensor, layout.shape, strides=strides, dtype=tile.dtype, device=tile.device)
    made.local = tile
    made.tile_layout = layout
    return made


def swap(tensor: TiledTensor, other: TiledTensor) -> TiledTensor:
    """Give `tensor` the data, shape and layout of `other`, as in-place operations on dims do."""
    tensor.data = other
    tensor.local, tensor.tile_layout, tensor.writeback = other.local, other.tile_layout, other.writeback
    return tensor


def _strides(tile: Tensor, layout: Layout) -> tuple[int, ...]:
    strides = tile.stride()
    known = layout.strides.get(strides)
    if known is None:
        order = _order_of_thin(layout, strides) if layout.is_thin else strides
        known = layout.strides[strides] = whole_strides(layout, order)
    return known


def _order_of_thin(layout: Layout, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, up to scale, of a whole with tiles of one pixel on a dim, whose strides do not say where that dim lies.

    Autograd picks formulas by strides, and all ranks must pick the same.  So only dims of which all ranks have two pixels
    count.  The other dims lie as in row-major memory, or as in channels last; `memory_format.py` does better where an
    operation's inputs show the order.
    """
    ordered = [dim for dim in layout.ordered_dims if strides[dim]]
    orders = usual_orders(len(layout.shape))
    return next((order for order in orders if same_order(ordered, order, strides)), orders[0])


def usual_orders(dims: int) -> list[tuple[int, ...]]:
    """Strides, up to scale, of the usual memory formats: row-major and, for 4 or 5 dims, channels last."""
    return [tuple(range(dims, 0, -1)), *([(dims + 1, 1, *range(dims, 2, -1))] if dims in (4, 5) else [])]


def same_order(dims: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two tensors' strides put these dims in the same order in memory."""
    return sorted(dims, key=lambda dim: -ours[dim]) == sorted(dims, key=lambda dim: -theirs[dim])


def whole_strides(layout: Layout, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a whole without gaps, whose dims lie in the order of a tile's `strides`."""
    if not layout.is_cut:
        return strides
    return strides_like(layout.shape, strides, keeps_zeros=True)


def wrap_uncut(value: Any, grid: Any) -> Any:
    """A result that is the same on every rank, as a tiled tensor without cuts; a single number stays plain."""
    if type(value) is TiledTensor or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    layout = uncut(tuple(value.shape), grid)
    return wrap_view(value, layout)


OTHER_KINDS: dict[type, Callable] = {}
"""By tensor subclass: what runs operations on tensors of that class and tiled tensors together."""
_HANDLERS: dict[Any, Callable] = {}
_handler_of: Callable[[Any], Callable]
_run_single_rank: Callable[[Any, tuple, dict | None], Any]
_redistribute: Callable[[TiledTensor, Layout], Tensor]


def _find(func: Any) -> Callable:
    handler = _HANDLERS[func] = _handler_of(func)
    return handler


def install(*, handler_of: Callable, run_single_rank: Callable, redistribute: Callable) -> None:
    """Set the functions that run operations on tiled tensors.  Those import this file, so `__init__.py` sets them, once.

    handler_of(func): the function that runs an operation.
    run_single_rank(func, args, kwargs): runs an operation on a grid of one rank.
    redistribute(tensor, layout): this rank's tile by another layout.
    """
    global _handler_of, _run_single_rank, _redistribute
    _handler_of, _run_single_rank, _redistribute = handler_of, run_single_rank, redistribute
