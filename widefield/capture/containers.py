"""Refuses arguments and results of modules with tensors in objects that torch's pytrees do not look into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.fake_parameters import is_tensor, name_of
from widefield.private_torch.pytree import tree_leaves

_BARE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    memoryview,
    range,
    torch.dtype,
    torch.device,
    torch.Generator,
    nn.Module,
    type,
)
"""Types whose objects contain no images."""
_DEPTH = 3


def refuse_hidden(module: nn.Module, nest: Any, does: str) -> None:
    """NotImplementedError if an object that is no pytree contains a tensor.  does: "is given" or "returns"."""
    for leaf in tree_leaves(nest):
        place = None if is_tensor(leaf) or isinstance(leaf, _BARE) else next(_places(leaf, _DEPTH), None)
        if place is not None:
            kind = type(leaf).__qualname__
            raise NotImplementedError(
                f"{name_of(module)} {does} a {kind}, whose {place} is a tensor that is not found there: images are looked for "
                "in tuples, lists, dicts and what else torch.utils._pytree knows; pass it in one of those, or call "
                f"torch.export.register_dataclass({kind}) once where that is a dataclass"
            )


def _places(thing: Any, depth: int) -> Iterator[str]:
    """Where an object contains tensors, as `.image` or `['image']`."""
    for name, value in _parts(thing):
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield name
            elif depth and not isinstance(leaf, _BARE):
                yield from (name + inner for inner in _places(leaf, depth - 1))


def _parts(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        return [(f"[{key!r}]", value) for key, value in thing.items()]
    if isinstance(thing, (Sequence, Set)):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    if callable(thing):  # a function or a loss: its attributes are no inputs
        return []
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)]
    return [(f".{name}", getattr(thing, name)) for name in [*getattr(thing, "__dict__", {}), *slots]]
