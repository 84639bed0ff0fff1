"""An operation and its arguments without numbers: all that decides the shapes of its result, its time and its own memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor


def signature_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """(name, args, pairs of keyword and argument), a tensor as ("tensor", shape, strides, dtype), a dtype and the like as text.

    1, 1.0 and True are equal in it, and so are their signatures; `repr` of it tells them apart.
    """
    return name, _spec(args), tuple((key, _spec(value)) for key, value in kwargs.items())


def _spec(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.stride(), str(value.dtype)[6:]
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
