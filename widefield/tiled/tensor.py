"""TiledTensor: a whole tensor whose pixels live in tiles, one per rank of a grid.

It has the whole's shape, so model code reads and computes sizes as on one device, and it carries this rank's tile.  Torch's
autograd works on top of it: what arrives here are aten operations, forward and backward alike, and each has a rule in rules/.
Values and gradients alike are those of the single device:

- tiled: cut over ranks by its layout; or uncut, the same on every rank, which is what becomes of sums over pixels;
- plain: an ordinary tensor that every rank has alike; a sum down to one number is plain, so that a loss is;
- a sum over pixels in a backward, as the gradient of a weight, is partial: a rank has its own pixels' part, times the number
  of tiles, so that the mean over ranks, which is taken anyway where weights learn, is the value.  See `partial.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Layout, uncut
from widefield.geometry.strides import strides_like
from widefield.private_torch.autograd import set_view_replay_enabled
from widefield.private_torch.tensors import disabled_torch_function_impl, make_wrapper_subclass


class TiledTensor(Tensor):
    """A tensor of the whole's shape; `local` is this rank's part of it and `tile_layout` says which part that is.

    Make it with `tile` or `from_tile`; `whole` gives a plain tensor back.
    """

    local: Tensor
    tile_layout: Layout
    """Where its pixels live (`layout` is taken: torch means dense or sparse by it)."""
    kept: dict
    """The halos that a forward operation fetched, for its backward: of tensors without a gradient alone."""

    writeback: Any = None
    """Of a view whose pixels had to move, and of views of that: what brings writes to it back to the tensor it shows."""

    may_alias_data: bool = False
    """Whether it may be `.data` of another, or a view of that: torch's count of writes to it is then not the other's."""

    repeats: bool = False
    """Whether it is an expanded tensor or a view of one, in which places may share their memory."""

    shown: bool = False
    """Whether views were taken of it."""

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if len(types) > 1:
            for kind in types:
                if kind in OTHER_KINDS:
                    return OTHER_KINDS[kind](func, args, kwargs or {})
        if args and type(args[0]) is TiledTensor and args[0].tile_layout.single_rank_layouts is not None:
            return _run_alone(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _find(func)
        return handler(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], self.tile_layout

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], layout: Layout, size: Any, stride: Any) -> TiledTensor:
        return wrap(inner["local"], layout)

    def __coerce_same_metadata_as_tangent__(self, laid: Layout, kind: type | None = None) -> Tensor:
        """A gradient as a compiled backward expects it: cut as its forward's output was."""
        return (
            _redistribute(self, uncut(self.tile_layout.shape, self.tile_layout.grid))
            if kind is Tensor
            else wrap(_redistribute(self, laid), laid)
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


def wrap(tile: Tensor, layout: Layout) -> TiledTensor:
    """The tiled tensor of which this rank holds `tile`; AssertionError where the tile is not of the layout's size.

    Its dims lie in memory in the tile's order, for torch asks for that: a reshape is a view or a copy by it.
    """
    assert tile.shape == layout.tile_shape, f"a tile of {tuple(tile.shape)} for {layout}, which wants {layout.tile_shape}"
    return wrap_view(tile, layout)


def wrap_view(tile: Tensor, layout: Layout, strides: tuple[int, ...] | None = None) -> TiledTensor:
    """`wrap` with the whole's strides, or in the tile's order."""
    set_view_replay_enabled(True)
    strides = _strides(tile, layout) if strides is None else strides
    made = make_wrapper_subclass(TiledTensor, layout.shape, strides=strides, dtype=tile.dtype, device=tile.device)
    made.local = tile
    made.tile_layout = layout
    return made


def swap(tensor: TiledTensor, other: TiledTensor) -> TiledTensor:
    """Make `tensor` show what `other` shows, its shape too: what operations do that change dims in place."""
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
    """Like strides, of a whole of which some tiles are one pixel thin, whose own strides do not tell where that dim lies.

    Autograd picks formulas by a tensor's strides, and all ranks must pick the same.  So only dims of which all ranks have two
    pixels tell.  What they do not tell is as in row-major memory, or in images as channels last; `memory_order` knows better,
    where an operation's inputs tell.
    """
    told = [dim for dim in layout.ordered_dims if strides[dim]]
    orders = usual_orders(len(layout.shape))
    return next((order for order in orders if same_order(told, order, strides)), orders[0])


def usual_orders(dims: int) -> list[tuple[int, ...]]:
    """Like strides: row-major and, of images, channels last."""
    return [tuple(range(dims, 0, -1)), *([(dims + 1, 1, *range(dims, 2, -1))] if dims in (4, 5) else [])]


def same_order(dims: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether these dims lie in memory in the same order by two tensors' strides."""
    return sorted(dims, key=lambda dim: -ours[dim]) == sorted(dims, key=lambda dim: -theirs[dim])


def whole_strides(layout: Layout, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a whole without gaps whose dims lie in memory in the order of a tile's `strides`."""
    if not layout.is_cut:
        return strides
    return strides_like(layout.shape, strides, keeps_zeros=True)


def wrap_uncut(value: Any, grid: Any) -> Any:
    """A result that every rank has alike: tiled without cuts; a single number stays plain."""
    if type(value) is TiledTensor or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    layout = uncut(tuple(value.shape), grid)
    return wrap_view(value, layout)


OTHER_KINDS: dict[type, Callable] = {}
"""What runs an operation on tiled tensors and such a kind of tensor together."""
_HANDLERS: dict[Any, Callable] = {}
_handler_of: Callable[[Any], Callable]
_run_alone: Callable[[Any, tuple, dict | None], Any]
_redistribute: Callable[[TiledTensor, Layout], Tensor]


def _find(func: Any) -> Callable:
    handler = _HANDLERS[func] = _handler_of(func)
    return handler


def install(*, handler_of: Callable, run_alone: Callable, redistribute: Callable) -> None:
    """Tell tiled tensors what runs their operations, which is written in terms of them: once, in this room's `__init__.py`.

    handler_of(func): what runs an operation.
    run_alone(func, args, kwargs): runs one on a grid of one rank.
    redistribute(tensor, layout): the tile that another layout gives this rank.
    """
    global _handler_of, _run_alone, _redistribute
    _handler_of, _run_alone, _redistribute = handler_of, run_alone, redistribute
