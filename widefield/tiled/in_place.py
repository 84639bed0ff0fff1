"""In-place operations and `out=`.

A pointwise operation writes to every tile by itself.  For any other, the variant that returns a new tensor runs, and its result
is copied into the target.  A view that is a copy is then written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Layout, uncut
from widefield.private_torch.autograd import current_graph_task_id
from widefield.private_torch.dispatcher import DispatchKey, op_dk_of
from widefield.private_torch.pytree import tree_map
from widefield.private_torch.tensors import is_view
from widefield.tiled.redistribute import to_layout, whole_of
from widefield.tiled.replicated_ops import has_internal_overlap, writable
from widefield.tiled.schemas import new_of, outs_of
from widefield.tiled.tensor import TiledTensor, swap, wrap
from widefield.tiled.view_writeback import version_of

aten = torch.ops.aten


def pointwise_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """A pointwise in-place operation.  RuntimeError, as torch's: several elements of the target share memory."""
    target = args[0]
    if type(target) is not TiledTensor:
        return _into_plain(func, args, kwargs)
    for arg in args:
        if type(arg) is TiledTensor and arg.writeback is not None:
            arg.writeback.refresh(version_of(arg))
    tiles = [to_layout(arg, target.tile_layout) if isinstance(arg, Tensor) else arg for arg in args]
    # The tile of a cut tensor may be empty, and that of a view a copy: their strides do not show an overlap.
    by_flag = target.tile_layout.is_cut or target.writeback is not None
    if func not in IDEMPOTENT and (target.may_overlap if by_flag else has_internal_overlap(target.local)):
        if current_graph_task_id() == -1 or target.tile_layout.is_cut:
            raise RuntimeError(OVERLAP)
        tiles = writable(target, tiles)
    if target.tile_layout.is_empty:
        without_pixels(func, tiles, kwargs, target.tile_layout)
    else:
        func(*tiles, **kwargs)
    if target.writeback is not None:
        target.writeback.flush(version_of(target) + 1)
    return target


IDEMPOTENT = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""Operations that may write to elements that share memory."""

OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please clone() "
    "the tensor before performing the operation."
)
"""Torch's message.  It is raised here, on all ranks, for torch would raise nothing on a rank with an empty tile."""


def pointwise_out(func: Any, args: tuple, kwargs: dict) -> Any:
    """A pointwise operation with `out=`.  Plain outs are written directly: so DDP scales gradients into its buckets."""
    names = outs_of(func)
    if any(type(kwargs[name]) is TiledTensor for name in names):
        return into_outs(func, args, kwargs)
    plain, others = tree_map(_plain, args), {name: _plain(value) for name, value in kwargs.items()}
    return func(*plain, **others)


def _plain(value: Any) -> Any:
    """All pixels of a tiled tensor, on every rank; other values as they are."""
    if type(value) is not TiledTensor:
        return value
    if value.writeback is not None:
        value.writeback.refresh(version_of(value))
    return whole_of(value)


def _into_plain(func: Any, args: tuple, kwargs: dict) -> Any:
    """An in-place operation on a plain tensor with tiled operands, which are gathered."""
    func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    return args[0]


def each(func: Any, args: tuple, kwargs: dict) -> Any:
    """A foreach operation, by torch's kernel that loops over the tensors."""
    return op_dk_of(func)(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def into_buckets(func: Any, args: tuple, kwargs: dict) -> Any:
    """FSDP2's copy of gradients into a plain bucket: tiled ones are gathered, and their mean over ranks is the same again."""
    args, kwargs = tree_map(_plain, (args, kwargs))
    return func(*args, **kwargs)


def without_pixels(func: Any, tiles: Sequence[Any], kwargs: dict, layout: Layout) -> Any:
    """Run an operation on empty tiles, and before that on tiles of one pixel, to raise the errors that other ranks raise."""
    is_compiling = any(isinstance(tile, Tensor) and type(tile) is not Tensor for tile in tiles)
    if 0 not in layout.shape and not is_compiling:
        func(*[tile.new_ones((1,) * tile.ndim) if isinstance(tile, Tensor) else tile for tile in tiles], **kwargs)
    return func(*tiles, **kwargs)


# ---------------------------------------------------------------------------------------------- through a new tensor


def into_outs(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func(*args, out=...)`: copies the results of `new_of(func)` into the outs, and returns these."""
    names = outs_of(func)
    outs = [kwargs[name] for name in names]
    made = new_of(func)(*args, **{name: value for name, value in kwargs.items() if name not in names})
    results = (made,) if len(outs) == 1 else made
    for out, value in zip(outs, results, strict=True):
        _check(func, out, value)
    for out, value in zip(outs, results, strict=True):
        _take(out, value)
    return outs[0] if len(outs) == 1 else tuple(outs)


def through_new(func: Any, args: tuple, kwargs: dict) -> Any:
    """An in-place operation: copies the result of `new_of(func)` into the first argument."""
    target = args[0]
    value = new_of(func)(*args, **kwargs)
    _check(func, target, value)
    _take(target, value)
    return target


def _check(func: Any, target: Tensor, value: Tensor) -> None:
    """RuntimeError, as torch's: the dtype cannot be cast.  NotImplementedError: the target would have to be resized."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{func}: result type {value.dtype} can't be cast to the desired output type {target.dtype}")
    is_any_view = type(target) is TiledTensor and (target.writeback is not None or is_view(target))
    if target.shape != value.shape and (target.numel() or is_any_view):
        raise NotImplementedError(
            f"{func} was given a tensor of shape {list(target.shape)} for a result of shape {list(value.shape)}; torch would "
            "resize it, which is not possible with tiles; give one of the result's shape"
        )


def _take(target: Tensor, value: Tensor) -> None:
    """Copy a result into a tensor, which is resized first if it is empty."""
    if target.shape != value.shape and type(target) is TiledTensor:
        new = aten.empty_like.default(value, dtype=target.dtype)
        swap(target, new if type(new) is TiledTensor else wrap(new, uncut(tuple(new.shape), target.tile_layout.grid)))
    elif target.shape != value.shape:
        target.resize_(value.shape)
    aten.copy_.default(target, value)
