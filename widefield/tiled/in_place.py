"""Operations that write into tensors they are given, in place or through `out=`.

A pointwise one writes to every tile by itself.  Of any other the operation that makes a new tensor is run, and that is put into
the given one, as `copy_` does: a tile takes its part.  What shows pixels that live elsewhere sends them there.
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
from widefield.tiled.replicated_ops import repeats_places, writable
from widefield.tiled.schemas import new_of, outs_of
from widefield.tiled.tensor import TiledTensor, swap, wrap
from widefield.tiled.view_writeback import version_of

aten = torch.ops.aten


def pointwise_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Every tile by itself; RuntimeError, in torch's words, where places share their memory."""
    target = args[0]
    if type(target) is not TiledTensor:
        return _into_plain(func, args, kwargs)
    for arg in args:
        if type(arg) is TiledTensor and arg.writeback is not None:
            arg.writeback.refresh(version_of(arg))
    tiles = [to_layout(arg, target.tile_layout) if isinstance(arg, Tensor) else arg for arg in args]
    is_told = target.tile_layout.is_cut or target.writeback is not None  # some ranks' tiles may be empty then, or copies
    if func not in IDEMPOTENT and (target.repeats if is_told else repeats_places(target.local)):
        if current_graph_task_id() == -1 or target.tile_layout.is_cut:
            raise RuntimeError(SHARED)
        tiles = writable(target, tiles)
    if target.tile_layout.is_empty:
        without_pixels(func, tiles, kwargs, target.tile_layout)
    else:
        func(*tiles, **kwargs)
    if target.writeback is not None:
        target.writeback.flush(version_of(target) + 1)
    return target


IDEMPOTENT = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""What may be written to places that share their memory."""

SHARED = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please clone() "
    "the tensor before performing the operation."
)
"""Torch's words, on all ranks: a rank without pixels of an expanded tensor would find nothing wrong."""


def pointwise_out(func: Any, args: tuple, kwargs: dict) -> Any:
    """`out=` takes the result; without a copy where it is plain: DDP scales gradients into its buckets so."""
    names = outs_of(func)
    if any(type(kwargs[name]) is TiledTensor for name in names):
        return into_outs(func, args, kwargs)
    plain, others = tree_map(_plain, args), {name: _plain(value) for name, value in kwargs.items()}
    return func(*plain, **others)


def _plain(value: Any) -> Any:
    """All pixels of a tensor, on every rank."""
    if type(value) is not TiledTensor:
        return value
    if value.writeback is not None:
        value.writeback.refresh(version_of(value))
    return whole_of(value)


def _into_plain(func: Any, args: tuple, kwargs: dict) -> Any:
    """A plain tensor takes a tiled one's values: the whole of it, which every rank then has."""
    func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    return args[0]


def each(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on lists of tensors: torch's own loop over them."""
    return op_dk_of(func)(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def into_buckets(func: Any, args: tuple, kwargs: dict) -> Any:
    """FSDP2 puts the gradients of plain weights into a plain bucket: wholes, whose mean over ranks is the whole again."""
    args, kwargs = tree_map(_plain, (args, kwargs))
    return func(*args, **kwargs)


def without_pixels(func: Any, tiles: Sequence[Any], kwargs: dict, layout: Layout) -> Any:
    """An operation on a tile without pixels, and before on one with one: what other ranks cannot do, this one refuses, too."""
    if 0 not in layout.shape and not any(
        isinstance(tile, Tensor) and type(tile) is not Tensor for tile in tiles
    ):  # a compiler looks on otherwise
        func(*[tile.new_ones((1,) * tile.ndim) if isinstance(tile, Tensor) else tile for tile in tiles], **kwargs)
    return func(*tiles, **kwargs)


# ---------------------------------------------------------------------------------------------- through a new tensor


def into_outs(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func(*args, out=...)`: the outs, which have taken what `new_of(func)` gives."""
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
    """`func`, which writes into its first argument, by the operation that makes a new tensor."""
    target = args[0]
    value = new_of(func)(*args, **kwargs)
    _check(func, target, value)
    _take(target, value)
    return target


def _check(func: Any, target: Tensor, value: Tensor) -> None:
    """RuntimeError, as torch's, for a dtype that a tensor cannot take; NotImplementedError for a shape that it cannot."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{func}: result type {value.dtype} can't be cast to the desired output type {target.dtype}")
    is_shown = type(target) is TiledTensor and (target.writeback is not None or is_view(target))
    if target.shape != value.shape and (target.numel() or is_shown):
        raise NotImplementedError(
            f"{func} was given a tensor of shape {list(target.shape)} for a result of shape {list(value.shape)}; torch would "
            "resize it, which a tensor that lies in tiles, or takes from such, cannot; give one of the result's shape"
        )


def _take(target: Tensor, value: Tensor) -> None:
    """Put a result into a tensor, which takes its shape first if it is empty."""
    if target.shape != value.shape and type(target) is TiledTensor:
        new = aten.empty_like.default(value, dtype=target.dtype)
        swap(target, new if type(new) is TiledTensor else wrap(new, uncut(tuple(new.shape), target.tile_layout.grid)))
    elif target.shape != value.shape:
        target.resize_(value.shape)
    aten.copy_.default(target, value)
