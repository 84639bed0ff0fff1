"""Operations that write into tensors they are given, through `out=` or in place, where no rule says how.

Each runs the operation that makes a new tensor, and puts that into the given one, as `copy_` does: a tile takes its part, and what
shows pixels that live elsewhere sends them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from widefield.engine.layout import uncut
from widefield.engine.tiled import TiledTensor, become, wrap

aten = torch.ops.aten


@cache
def written_by(func: Any) -> tuple[tuple[int | str, ...], ...]:
    """Which arguments an operation writes into: places of those in a row, names of the others."""
    arguments = func._schema.arguments
    places = [a.name if a.kwarg_only else place for place, a in enumerate(arguments) if _is_written(a)]
    return tuple(places)


def targets_of(func: Any, args: Sequence[Any], kwargs: dict) -> list[Any]:
    """The arguments that `func` writes into."""
    found = [args[p] if isinstance(p, int) and p < len(args) else kwargs.get(_name(func, p)) for p in written_by(func)]
    return [target for target in found if target is not None]


def _name(func: Any, place: int | str) -> str:
    return place if isinstance(place, str) else func._schema.arguments[place].name


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@cache
def outs_of(func: Any) -> list[str]:
    """The names of the arguments by which results are asked into given tensors: ["out"], or ["values", "indices"]."""
    return [a.name for a in func._schema.arguments if a.kwarg_only and _is_written(a)]


@cache
def new_of(func: Any) -> Any:
    """The operation of the same arguments that makes new tensors in place of writing; None where there is none."""
    packet = func._overloadpacket
    if outs_of(func):
        packets = [packet]
    else:
        packets = [getattr(getattr(torch.ops, func.namespace), packet.__name__.removesuffix("_"), None)]
    wanted = _signature(func)
    overloads = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    same = [found for found in overloads if not written_by(found) and _signature(found) == wanted]
    return same[0] if same else None


def _signature(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if not (a.kwarg_only and _is_written(a))]


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


def in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func`, which writes into its first argument, by the operation that makes a new tensor."""
    target = args[0]
    value = new_of(func)(*args, **kwargs)
    _check(func, target, value)
    _take(target, value)
    return target


def _check(func: Any, target: Tensor, value: Tensor) -> None:
    """RuntimeError, as torch's, for a dtype that a tensor cannot take; NotImplementedError for a shape that it would have to."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{func}: result type {value.dtype} can't be cast to the desired output type {target.dtype}")
    is_shown = type(target) is TiledTensor and (target.home is not None or target._is_view())
    if target.shape != value.shape and (target.numel() or is_shown):
        raise NotImplementedError(
            f"{func} was given a tensor of shape {list(target.shape)} for a result of shape {list(value.shape)}; torch would "
            "resize it, which a tensor that lies in tiles, or takes from such, cannot; give one of the result's shape"
        )


def _take(target: Tensor, value: Tensor) -> None:
    """Put a result into a tensor, which takes its shape first if it is empty."""
    if target.shape != value.shape and type(target) is TiledTensor:
        new = aten.empty_like.default(value, dtype=target.dtype)
        become(target, new if type(new) is TiledTensor else wrap(new, uncut(tuple(new.shape), target.laid.grid)))
    elif target.shape != value.shape:
        target.resize_(value.shape)
    aten.copy_.default(target, value)
