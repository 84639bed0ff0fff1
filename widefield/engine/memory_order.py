"""The order in memory of what an operation makes of tiles too thin to tell it: torch is asked, on tensors without data.

A tile of one pixel on a dim does not say where that dim lies.  Which formulas autograd picks, whether a reshape is a view, and
in which order random numbers are drawn depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from widefield.engine.tiled import TiledTensor, same_order, wrap_view

Strides = tuple[int, ...]


def ordered(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """What `run` gives for `func`, which makes new tensors; thin ones have the strides that torch gives the whole."""
    out = run(func, args, kwargs)
    if func is torch.ops.aten.cat.default and any(_is_unsure(part) for part in args[0] if type(part) is TiledTensor):
        return _brought_in_order(out, _strides(func, args, kwargs)[0])  # its tile lies as thin pieces do, on this rank
    if type(out) is TiledTensor:
        return _in_order(out, _strides(func, args, kwargs), 0) if _is_unsure(out) else out
    if type(out) is tuple and any(type(each) is TiledTensor and _is_unsure(each) for each in out):
        strides = _strides(func, args, kwargs)
        return tuple(_in_order(each, strides, at) for at, each in enumerate(out))
    return out


def _is_unsure(made: TiledTensor) -> bool:
    return made.laid.is_cut and made.laid.is_thin and made.home is None and type(made.own) is Tensor


def _in_order(made: Any, strides: Sequence[Strides | None], at: int) -> Any:
    if type(made) is not TiledTensor or not _is_unsure(made):
        return made
    wanted = strides[at] if at < len(strides) else None
    if wanted is None or wanted == made.stride() or not same_order(made.laid.dims_told, wanted, made.own.stride()):
        return made
    return wrap_view(made.own, made.laid, wanted)


def _brought_in_order(made: TiledTensor, wanted: Strides | None) -> TiledTensor:
    """The same whose tile lies in memory as `wanted`, strides of the whole, says."""
    if wanted is None or not made.laid.is_cut:
        return made
    tile, dims = made.own, range(made.ndim)
    if not same_order([dim for dim in dims if tile.shape[dim] > 1], wanted, tile.stride()):
        tile = torch.empty_permuted(
            tile.shape, sorted(dims, key=lambda dim: -wanted[dim]), dtype=tile.dtype, device=tile.device
        )
        tile.copy_(made.own)
    return wrap_view(tile, made.laid, wanted)


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
    with _disable_current_modes():
        try:
            made = func(*tree_map(_empty, args), **tree_map(_empty, kwargs))
        except (NotImplementedError, RuntimeError):  # it looks at values
            return ()
    return tuple(each.stride() if isinstance(each, Tensor) else None for each in (made if type(made) is tuple else (made,)))


def _empty(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
