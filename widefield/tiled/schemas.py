"""What an operation writes into, by its schema: its first argument, or the tensors given as `out=`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from widefield.private_torch.dispatcher import schema_of

NUMBERS = (int, float, bool)
"""A list that begins with one of these holds no tensors: an operation's lists are of one kind."""


@cache
def written_by(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operation writes into: indices of positional ones, names of keyword-only ones."""
    arguments = schema_of(func).arguments
    places = [a.name if a.kwarg_only else place for place, a in enumerate(arguments) if _is_written(a)]
    return tuple(places)


def targets_of(func: Any, args: Sequence[Any], kwargs: dict) -> list[Any]:
    """The arguments that `func` writes into."""
    found = [args[p] if isinstance(p, int) and p < len(args) else kwargs.get(_name(func, p)) for p in written_by(func)]
    return [target for target in found if target is not None]


def _name(func: Any, place: int | str) -> str:
    return place if isinstance(place, str) else schema_of(func).arguments[place].name


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@cache
def outs_of(func: Any) -> list[str]:
    """The names of an operation's `out=` arguments: ["out"], or ["values", "indices"]; [] for none."""
    return [a.name for a in schema_of(func).arguments if a.kwarg_only and _is_written(a)]


@cache
def new_of(func: Any) -> Any:
    """The variant of an operation that returns new tensors and writes into none; None where there is none."""
    packet = func.overloadpacket
    if outs_of(func):
        packets = [packet]
    else:
        packets = [getattr(getattr(torch.ops, func.namespace), packet.__name__.removesuffix("_"), None)]
    wanted = _signature(func)
    overloads = [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]
    same = [found for found in overloads if not written_by(found) and _signature(found) == wanted]
    return same[0] if same else None


def _signature(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema_of(func).arguments if not (a.kwarg_only and _is_written(a))]
