"""The order in memory of what an operation makes of tiles that do not tell it: torch is asked, on tensors without data.

A tile of one pixel on a dim does not say where that dim lies, and what rules make of images with channels last may lie
otherwise than what torch makes.  Which formulas autograd picks, whether a reshape is a view, and in which order random numbers
are drawn depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from widefield.tiled.tensor import TiledTensor, same_order, wrap_view

aten = torch.ops.aten
Strides = tuple[int, ...]
_MADE_OF_OTHERS = {aten.roll.default}
"""What is made of other operations, which are each in order, and about which torch is wrong without data."""
_LIKE: dict[Any, int] = {
    aten.replication_pad2d_backward.default: 1, aten.reflection_pad2d_backward.default: 1,
    aten.replication_pad3d.default: 0, aten.replication_pad3d_backward.default: 1,
    aten.reflection_pad3d.default: 0, aten.reflection_pad3d_backward.default: 1,
    aten.native_batch_norm_backward.default: 1, aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1, aten.channel_shuffle.default: 0,
}  # fmt: skip
"""Kernels that make row-major images, or ones with channels last, as this argument is."""
_ROW_MAJOR = {
    aten.native_layer_norm_backward.default, aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.glu_backward.default, aten.log_sigmoid_forward.default, aten.poisson.default, aten.rrelu_with_noise.default,
}  # fmt: skip
"""Kernels that make row-major images of any."""


def ordered(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """What `run` gives for `func`, which makes new tensors, lying as the whole does."""
    out = run(func, args, kwargs)
    if func in _MADE_OF_OTHERS:
        return out
    is_unsure = _is_unsure(args, of_tiles=is_pointwise(func) and func not in COMPOSED)
    if type(out) is TiledTensor:
        return _in_order(out, _strides(func, args, kwargs), 0) if is_unsure or out.tile_layout.is_thin else out
    if type(out) is tuple and (is_unsure or any(type(each) is TiledTensor and each.tile_layout.is_thin for each in out)):
        strides = _strides(func, args, kwargs)
        return tuple(_in_order(each, strides, at) for at, each in enumerate(out))
    return out


def _is_unsure(args: Sequence[Any], *, of_tiles: bool) -> bool:
    """Whether what comes of it may lie otherwise than the whole does.

    What comes of a tile that is too thin to tell lies by chance, another on each rank.  And of images that are not row-major
    some of torch's operations make images like them and some row-major ones, which is more than rules know.
    of_tiles: the operation itself runs on the tiles.
    """
    for arg in args:
        if type(arg) is TiledTensor:
            if arg.tile_layout.is_thin or not (of_tiles or arg.is_contiguous()):
                return True
        elif isinstance(arg, Tensor):
            if not (of_tiles or arg.is_contiguous()):
                return True
        elif type(arg) is list and _is_unsure(arg, of_tiles=of_tiles):
            return True
    return False


def _in_order(made: Any, strides: Sequence[Strides | None], at: int) -> Any:
    if type(made) is not TiledTensor or made.writeback is not None or type(made.local) is not Tensor:
        return made
    wanted = strides[at] if at < len(strides) else None
    if wanted is None:
        return made
    tile = _laid(made.local, wanted)
    return made if wanted == made.stride() and tile is made.local else wrap_view(tile, made.tile_layout, wanted)


def _laid(tile: Tensor, wanted: Strides) -> Tensor:
    """The tile with its dims in the order of a whole's strides; a copy where it lies otherwise.

    A dim of one pixel has the stride that torch would give it, for by others kernels may see another format.
    """
    lies = _lies_as(tile, wanted)
    if lies and 1 not in tile.shape:
        return tile
    strides = strides_like(tile.shape, wanted)
    if lies and is_dense(tile):
        return tile if tile.stride() == strides else tile.as_strided(tile.shape, strides)
    return tile if lies else torch.empty_strided(tile.shape, strides, dtype=tile.dtype, device=tile.device).copy_(tile)


def _lies_as(tile: Tensor, wanted: Strides) -> bool:
    return same_order([dim for dim in range(tile.ndim) if tile.shape[dim] > 1], wanted, tile.stride())


# ---------------------------------------------------------------------------------------------- asking torch

_KNOWN: dict[tuple, tuple[Strides | None, ...]] = {}
KNOWN_MOST = 16384
"""How many answers are kept: arguments that are new in every step must not fill the memory."""


def _strides(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    """The strides of what `func` makes of the wholes, as far as their shapes tell."""
    key: list = [func]
    for arg in args if not kwargs else (*args, *kwargs.items()):
        if isinstance(arg, Tensor):
            key.append(arg.shape)
            key.append(arg.stride())
        else:
            key.append(_key(arg) if isinstance(arg, (list, tuple)) else arg)
    named = tuple(key)
    try:
        known = _KNOWN.get(named)
    except TypeError:  # an argument without a hash
        return _asked(func, args, kwargs)
    if known is None:
        if len(_KNOWN) >= KNOWN_MOST:
            _KNOWN.clear()
        known = _KNOWN[named] = _asked(func, args, kwargs)
    return known


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride()
    return (type(value), *map(_key, value)) if isinstance(value, (list, tuple)) else value


def _asked(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    if _runs_on_few(func):
        return _of_few(func, args, kwargs)
    with disable_current_modes(), FakeTensorMode(), quiet():  # on this device: kernels choose, and meta has its own
        try:
            given, named = tree_map(_empty, args), tree_map(_empty, kwargs)
            made = as_kernels_lay(func, given, named, func(*given, **named))
        except (NotImplementedError, RuntimeError, ValueError):  # it looks at values
            return ()
    return tuple(each.stride() if isinstance(each, Tensor) else None for each in (made if type(made) is tuple else (made,)))


def _runs_on_few(func: Any) -> bool:
    """Whether torch can be asked on a few pixels: what goes through pixels one by one looks at no sizes."""
    return is_pointwise(func) and torch.Tag.nondeterministic_seeded not in func.tags


def _of_few(func: Any, args: tuple, kwargs: dict) -> tuple[Strides | None, ...]:
    """The strides of what `func` makes, by torch's own kernels on images of one pixel, or two, per dim that lie alike."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    with disable_current_modes(), torch.no_grad():
        try:
            shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
            made = func(*tree_map(_few, args), **tree_map(_few, kwargs))
        except (NotImplementedError, RuntimeError, ValueError):
            return ()
    return tuple(
        strides_like(shape, each.stride()) if isinstance(each, Tensor) and each.ndim == len(shape) else None
        for each in (made if type(made) is tuple else (made,))
    )


def _few(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    few = [min(2, max(1, extent)) for extent in value.shape]
    strides = strides_like(few, value.stride(), keeps_zeros=True)
    return torch.empty_strided(few, strides, dtype=value.dtype, device=value.device).fill_(1)


def as_kernels_lay(func: Any, args: tuple, kwargs: dict, made: Any) -> Any:
    """What an operation that is no view makes without data, as its kernels lay it out, where torch says otherwise."""
    first = made[0] if isinstance(made, tuple) else made
    if not isinstance(first, Tensor):
        return made
    if func in _ROW_MAJOR:
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
    elif func in _LIKE:
        first = torch.empty_like(first, memory_format=suggest_memory_format(args[_LIKE[func]]))
    elif "batch_norm" in func.__name__ and isinstance(made, tuple):  # forward, which keeps any order without data
        first = torch.empty_like(first, memory_format=suggest_memory_format(first))
    elif _runs_on_few(func) and any(isinstance(a, Tensor) and not a.is_contiguous() for a in tree_leaves((args, kwargs))):
        (strides, *_) = _of_few(func, args, kwargs) or (None,)
        if strides is not None and len(strides) == first.ndim and strides != first.stride():
            first = first.new_empty_strided(first.shape, strides)
    return (first, *made[1:]) if isinstance(made, tuple) else first


def _empty(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


@contextmanager
def quiet() -> Iterator[None]:
    """Fake tensors print the errors that they raise, too."""
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    was, log.disabled = log.disabled, True  # another level would empty the caches of all loggers
    try:
        yield
    finally:
        log.disabled = was
