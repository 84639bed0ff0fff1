"""The order of a result's dims in memory, which should be the single device's.

Autograd's choice of formulas, whether a reshape is a view, and the order in which random numbers are drawn depend on it.  Rules
may give channels-last results another order than torch does, and a tile of one pixel on a dim does not show where that dim
lies.  In such cases torch is asked: the operation runs on fake tensors, or on a few pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.strides import strides_like
from widefield.private_torch.dispatcher import disable_current_modes
from widefield.private_torch.fake_tensors import FAKE_TENSOR_LOGGER, FakeTensorMode, suggest_memory_format
from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.rules import COMPOSED
from widefield.tiled.pointwise import is_pointwise
from widefield.tiled.redistribute import is_dense
from widefield.tiled.schemas import NUMBERS
from widefield.tiled.tensor import TiledTensor, same_order, wrap_view

aten = torch.ops.aten
Strides = tuple[int, ...]
_MADE_OF_OTHERS = {aten.roll.default}
"""Composed operations whose parts have the right order, and for which fake tensors give a wrong one."""
_LIKE: dict[Any, int] = {
    aten.replication_pad2d_backward.default: 1, aten.reflection_pad2d_backward.default: 1,
    aten.replication_pad3d.default: 0, aten.replication_pad3d_backward.default: 1,
    aten.reflection_pad3d.default: 0, aten.reflection_pad3d_backward.default: 1,
    aten.native_batch_norm_backward.default: 1, aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1, aten.channel_shuffle.default: 0,
}  # fmt: skip
"""Operations whose result has the memory format of the argument with this index: channels last, else row-major."""
_ROW_MAJOR = {
    aten.native_layer_norm_backward.default, aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.glu_backward.default, aten.log_sigmoid_forward.default, aten.poisson.default, aten.rrelu_with_noise.default,
}  # fmt: skip
"""Operations whose result is always row-major."""


def ordered(func: Any, run: Callable) -> Callable:
    """`run`, which runs `func` as run(func, args, kwargs), with all its results' dims in the order of the single device's.

    The results must be new tensors.
    """
    if func in _MADE_OF_OTHERS:
        return run
    of_tiles = is_pointwise(func) and func not in COMPOSED
    return partial(_ordered, run, of_tiles)


def _ordered(run: Callable, of_tiles: bool, func: Any, args: tuple, kwargs: dict) -> Any:
    out = run(func, args, kwargs)
    is_unsure = _is_unsure(args, of_tiles)
    if type(out) is TiledTensor:
        return _in_order(out, _strides(func, args, kwargs), 0) if is_unsure or out.tile_layout.is_thin else out
    if type(out) is tuple and (is_unsure or any(type(each) is TiledTensor and each.tile_layout.is_thin for each in out)):
        strides = _strides(func, args, kwargs)
        return tuple(_in_order(each, strides, at) for at, each in enumerate(out))
    return out


def _is_unsure(args: Sequence[Any], of_tiles: bool) -> bool:
    """Whether the results may have another order of dims in memory than the single device's.

    Tiles of one pixel on a dim may give another order on each rank.  For inputs that are not row-major, some of torch's
    operations keep the order and some do not, which rules do not know.
    of_tiles: the operation itself runs on the tiles, as torch's pointwise operations do.
    """
    for arg in args:
        kind = type(arg)
        if kind is TiledTensor:
            if arg.tile_layout.is_thin or not (of_tiles or arg.is_contiguous()):
                return True
        elif kind is list:
            if arg and type(arg[0]) not in NUMBERS and _is_unsure(arg, of_tiles):
                return True
        elif isinstance(arg, Tensor):
            if not (of_tiles or arg.is_contiguous()):
                return True
    return False


def _in_order(made: Any, strides: Sequence[Strides | None], at: int) -> Any:
    if type(made) is not TiledTensor or made.writeback is not None or type(made.local) is not Tensor:
        return made
    wanted = strides[at] if at < len(strides) else None
    if wanted is None:
        return made
    tile = _in_memory_order(made.local, wanted)
    return made if wanted == made.stride() and tile is made.local else wrap_view(tile, made.tile_layout, wanted)


def _in_memory_order(tile: Tensor, wanted: Strides) -> Tensor:
    """The tile with its dims in the order of the whole's strides; a copy where it has another order.

    A dim of one pixel gets the stride that torch would give it, for kernels infer the memory format from that, too.
    """
    has_order = _has_order(tile, wanted)
    if has_order and 1 not in tile.shape:
        return tile
    strides = strides_like(tile.shape, wanted)
    if has_order and is_dense(tile):
        return tile if tile.stride() == strides else tile.as_strided(tile.shape, strides)
    return tile if has_order else torch.empty_strided(tile.shape, strides, dtype=tile.dtype, device=tile.device).copy_(tile)


def _has_order(tile: Tensor, wanted: Strides) -> bool:
    return same_order([dim for dim in range(tile.ndim) if tile.shape[dim] > 1], wanted, tile.stride())


# ---------------------------------------------------------------------------------------------- asking torch

_CACHE: dict[tuple, tuple[Strides | None, ...]] = {}
CACHE_SIZE = 16384
"""Most entries of the cache; arguments may be new in every step."""


def _strides(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    """The strides of the results of `func` on whole tensors, one per result; None or missing where they are unknown."""
    key: list = [func]
    for arg in args if not kwargs else (*args, *kwargs.items()):
        if isinstance(arg, Tensor):
            key.append(arg.shape)
            key.append(arg.stride())
        else:
            key.append(_key(arg) if isinstance(arg, (list, tuple)) else arg)
    named = tuple(key)
    try:
        known = _CACHE.get(named)
    except TypeError:  # an argument without a hash
        return _compute_strides(func, args, kwargs)
    if known is None:
        if len(_CACHE) >= CACHE_SIZE:
            _CACHE.clear()
        known = _CACHE[named] = _compute_strides(func, args, kwargs)
    return known


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride()
    return (type(value), *map(_key, value)) if isinstance(value, (list, tuple)) else value


def _compute_strides(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    if _can_probe(func):
        return _probe(func, args, kwargs)
    with disable_current_modes(), FakeTensorMode(), quiet():  # fakes of this device, for the order depends on its kernels
        try:
            given, named = tree_map(_empty, args), tree_map(_empty, kwargs)
            made = with_kernel_strides(func, given, named, func(*given, **named))
        except (NotImplementedError, RuntimeError, ValueError):  # it reads values
            return ()
    return tuple(each.stride() if isinstance(each, Tensor) else None for each in (made if type(made) is tuple else (made,)))


def _can_probe(func: Any) -> bool:
    """Whether running `func` on a few pixels shows the order: pointwise operations do not depend on sizes."""
    return is_pointwise(func) and torch.Tag.nondeterministic_seeded not in func.tags


def _probe(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    """The strides of the results of `func`, by running it on tensors of one or two pixels per dim in the same order."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    with disable_current_modes(), torch.no_grad():
        try:
            shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
            made = func(*tree_map(_probe_input, args), **tree_map(_probe_input, kwargs))
        except (NotImplementedError, RuntimeError, ValueError):
            return ()
    return tuple(
        strides_like(shape, each.stride()) if isinstance(each, Tensor) and each.ndim == len(shape) else None
        for each in (made if type(made) is tuple else (made,))
    )


def _probe_input(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    few = [min(2, max(1, extent)) for extent in value.shape]
    strides = strides_like(few, value.stride(), keeps_zeros=True)
    return torch.empty_strided(few, strides, dtype=value.dtype, device=value.device).fill_(1)


def with_kernel_strides(func: Any, args: tuple, kwargs: dict, made: Any) -> Any:
    """The fake results `made` of an operation that is no view, with the order of its kernels where fake tensors differ."""
    first = made[0] if isinstance(made, tuple) else made
    if not isinstance(first, Tensor):
        return made
    if func in _ROW_MAJOR:
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
    elif func in _LIKE:
        first = torch.empty_like(first, memory_format=suggest_memory_format(args[_LIKE[func]]))
    elif "batch_norm" in func.__name__ and isinstance(made, tuple):  # forward: as a fake it keeps any order
        first = torch.empty_like(first, memory_format=suggest_memory_format(first))
    elif _can_probe(func) and any(isinstance(a, Tensor) and not a.is_contiguous() for a in tree_leaves((args, kwargs))):
        (strides, *_) = _probe(func, args, kwargs) or (None,)
        if strides is not None and len(strides) == first.ndim and strides != first.stride():
            first = first.new_empty_strided(first.shape, strides)
    return (first, *made[1:]) if isinstance(made, tuple) else first


def _empty(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log of fake tensors, which repeats the errors that they raise."""
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    was, log.disabled = log.disabled, True  # setting a level would clear the caches of all loggers
    try:
        yield
    finally:
        log.disabled = was
