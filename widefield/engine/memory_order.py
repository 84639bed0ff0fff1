"""The order in memory of what an operation makes of tiles too thin to tell it: torch is asked, on tensors without data.

A tile of one pixel on a dim does not say where that dim lies.  Which formulas autograd picks, whether a reshape is a view, and
in which order random numbers are drawn depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from widefield.engine.tiled import TiledTensor, same_order, wrap_view

Strides = tuple[int, ...]


def ordered(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """What `run` gives for `func`, which makes new tensors; thin ones, and what is made of thin ones, lie as the whole does."""
    out = run(func, args, kwargs)
    is_unsure = _reads_thin(args)
    if type(out) is TiledTensor:
        return _in_order(out, _strides(func, args, kwargs), 0) if is_unsure or out.laid.is_thin else out
    if type(out) is tuple and (is_unsure or any(type(each) is TiledTensor and each.laid.is_thin for each in out)):
        strides = _strides(func, args, kwargs)
        return tuple(_in_order(each, strides, at) for at, each in enumerate(out))
    return out


def _reads_thin(args: Sequence[Any]) -> bool:
    """Whether a tile is too thin to tell; what comes of it lies as it does by chance, another on each rank."""
    for arg in args:
        if type(arg) is TiledTensor:
            if arg.laid.is_thin:
                return True
        elif type(arg) is list and _reads_thin(arg):
            return True
    return False


def _in_order(made: Any, strides: Sequence[Strides | None], at: int) -> Any:
    if type(made) is not TiledTensor or not made.laid.is_cut or made.home is not None or type(made.own) is not Tensor:
        return made
    wanted = strides[at] if at < len(strides) else None
    if wanted is None or wanted == made.stride() and _lies_as(made.own, wanted):
        return made
    tile = made.own
    if not _lies_as(tile, wanted):
        order = sorted(range(tile.ndim), key=lambda dim: -wanted[dim])
        tile = torch.empty_permuted(tile.shape, order, dtype=tile.dtype, device=tile.device).copy_(tile)
    return wrap_view(tile, made.laid, wanted)


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
    with _disable_current_modes(), FakeTensorMode(), quiet():  # on this device: kernels choose, and meta has its own
        try:
            made = as_kernels_lay(func, func(*tree_map(_empty, args), **tree_map(_empty, kwargs)))
        except (NotImplementedError, RuntimeError, ValueError):  # it looks at values
            return ()
    return tuple(each.stride() if isinstance(each, Tensor) else None for each in (made if type(made) is tuple else (made,)))


def as_kernels_lay(func: Any, made: Any) -> Any:
    """What an operation makes without data; batch norms keep any order then, and kernels make row-major or channels last."""
    if "batch_norm" not in func.__name__ or not isinstance(made, tuple):
        return made
    image = made[0]
    return torch.empty_like(image, memory_format=suggest_memory_format(image)), *made[1:]


def _empty(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


@contextmanager
def quiet() -> Iterator[None]:
    """Fake tensors print the errors that they raise, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True  # another level would empty the caches of all loggers
    try:
        yield
    finally:
        log.disabled = was
