"""The fast path on a grid of one rank: unwrap the tiles, run the plain operation, wrap its results.

For small images Python's overhead dominates, and this is the least that an operation on a TiledTensor costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Layout, uncut
from widefield.private_torch.dispatcher import op_of
from widefield.private_torch.tensors import make_wrapper_subclass
from widefield.rules import COMPOSED, PLAIN_OUTPUTS
from widefield.tiled.dispatch import alias, load_rules
from widefield.tiled.replicated_ops import on_every_rank
from widefield.tiled.schemas import NUMBERS, outs_of, written_by
from widefield.tiled.tensor import TiledTensor, swap, wrap_view
from widefield.tiled.view_writeback import count_write, counted

_aten = torch.ops.aten
_DETACH, _ALIAS = _aten.detach.default, _aten.alias.default
_CONJUGATE, _NEGATIVE = _aten._conj.default, _aten._neg_view.default
for _norm in (_aten.native_group_norm, _aten.native_batch_norm, _aten.native_layer_norm, _aten.cudnn_batch_norm):
    PLAIN_OUTPUTS.setdefault(_norm.default, (1, 2))  # statistics stay plain: saving a plain tensor for the backward is cheaper


def run_single_rank(func: Any, args: tuple, kwargs: dict | None) -> Any:
    """Run `func` on a grid of one rank.  args[0] is tiled."""
    first = args[0]
    layout = first.tile_layout
    if func is _CONJUGATE or func is _NEGATIVE:
        return _resolved(func, first)
    for arg in args:
        if type(arg) is TiledTensor and arg.writeback is not None:  # a conjugate, or a view of one
            return _with_writeback(func, args, kwargs or {})
    if func is _DETACH:  # autograd calls it to save an output; the tile has no autograd history to detach from
        made = make_wrapper_subclass(TiledTensor, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device)
        made.local, made.tile_layout = first.local, layout
        return made
    plain: list[Any] = [
        arg.local if type(arg) is TiledTensor else _plain_list(arg) if type(arg) is list else arg for arg in args
    ]
    if kwargs:
        given = {key: value.local if type(value) is TiledTensor else value for key, value in kwargs.items()}
        out = op_of(func)(*plain, **given)
        if outs_of(func):
            return _written(outs_of(func), kwargs)
    else:
        out = op_of(func)(*plain)
    if type(out) is tuple or type(out) is list:
        skip = PLAIN_OUTPUTS.get(func, ())
        return type(out)([_wrapped(v, layout) if isinstance(v, Tensor) and n not in skip else v for n, v in enumerate(out)])
    if out is plain[0]:
        if first.has_views or first.is_inference():
            count_write()
        return first if out.shape == first.shape else swap(first, _always_tiled(out, layout))
    return _wrapped(out, layout) if isinstance(out, Tensor) else out


def _resolved(func: Any, tensor: TiledTensor) -> Tensor:
    """The conjugate or the negative, which are computed at once; see ops/views.py."""
    load_rules()
    return COMPOSED[func](tensor)


def _with_writeback(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on conjugates or their views, which have a write-back to their source."""
    if func is _DETACH or func is _ALIAS:
        return alias(func, args, kwargs)
    return counted(on_every_rank, func, args, kwargs) if written_by(func) else on_every_rank(func, args, kwargs)


def _written(names: Sequence[str], kwargs: dict) -> Any:
    """The tensors given as `out=`; the operation may have changed their shapes."""
    for name in names:
        out = kwargs[name]
        if type(out) is TiledTensor and (out.has_views or out.is_inference()):
            count_write()
        if type(out) is TiledTensor and out.local.shape != out.shape:
            swap(out, _always_tiled(out.local, out.tile_layout))
    return kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)


def _plain_list(values: list) -> list:
    if not values or type(values[0]) in NUMBERS:
        return values
    return [value.local if type(value) is TiledTensor else value for value in values]


def _always_tiled(value: Tensor, layout: Layout) -> TiledTensor:
    """The value as a tiled tensor, also if it is a single number: a tensor that was tiled stays so."""
    made = _wrapped(value, layout)
    return made if type(made) is TiledTensor else wrap_view(made, uncut((), layout.grid))


def _wrapped(value: Tensor, layout: Layout) -> Tensor:
    shape = value.shape
    if shape != layout.shape:
        if not shape:
            return value  # a single number is plain
        assert layout.single_rank_layouts is not None
        known = layout.single_rank_layouts.get(shape)
        if known is None:
            known = layout.single_rank_layouts[shape] = uncut(tuple(shape), layout.grid)
        layout = known
    made = make_wrapper_subclass(TiledTensor, shape, strides=value.stride(), dtype=value.dtype, device=value.device)
    made.local, made.tile_layout = value, layout
    return made
