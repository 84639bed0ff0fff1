"""What was made for the calls of a module so far, and on what of a call that depends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from widefield.engine.stream.follow import is_tensor, tensors_of
from widefield.engine.stream.graph import Graph, Value

MOST = 16
"""How many are kept, for images whose size is new in every step."""
Made = TypeVar("Made")


class Known(Generic[Made]):
    """What `make` made for each kind of call, the last MOST of them."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Made, list[Any]]] = {}

    def get(self, module: nn.Module, args: tuple, kwargs: dict, make: Callable[[], Made], *more: Any) -> Made:
        """What is there for this call, else what `make()` gives.  more: what it depends on besides."""
        key = (*more, *_key(module, args, kwargs))
        entry = self._made.pop(key, None) or (make(), _things_of(module))
        self._made[key] = entry  # the last one used comes last
        while len(self._made) > MOST:
            del self._made[next(iter(self._made))]
        return entry[0]

    def __len__(self) -> int:
        return len(self._made)

    def values(self) -> list[Made]:
        """What is there, the last one used at the end."""
        return [made for made, _ in self._made.values()]


def _key(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """What the operations of a call depend on, but for the pixels and the weights' numbers."""
    tensors = tuple(
        (tuple(t.shape), t.dtype, t.device, getattr(t, "requires_grad", False), getattr(t, "laid", None), _strides(t))
        for t in tensors_of((args, kwargs))
    )
    others = tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not is_tensor(leaf))
    modes = tuple((id(part), _attributes(part)) for part in module.modules())
    wants = tuple(p.requires_grad for p in module.parameters())
    cast = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda"))
    return tensors, others, modes, wants, cast, torch.is_grad_enabled()


def _attributes(part: nn.Module) -> tuple:
    """What a module's forward may depend on: numbers, texts and modes, its hooks, what kind of tensors it holds besides
    weights."""
    held = part.__dict__
    return type(part), *[(name, _as_key(value)) for name, value in held.items() if _counts(name, value)]


def _counts(name: str, value: Any) -> bool:
    return name not in _NOT_ASKED and (not isinstance(value, dict) or bool(value))  # most are hooks that are not there


_NOT_ASKED = {"_stream", "_parameters", "_buffers", "_modules"}
_PLAIN = (bool, int, float, str, type(None))


def _as_key(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_as_key(entry) for entry in value)
    if isinstance(value, dict):
        return tuple((str(name), _as_key(entry)) for name, entry in value.items())
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else id(value)


def _things_of(module: nn.Module) -> list[Any]:
    """All that a key knows by its identity, which must not pass to another thing while the key is in use."""
    things: list[Any] = []

    def gather(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            [gather(entry) for entry in value]
        elif isinstance(value, dict):
            [gather(entry) for entry in value.values()]
        elif not isinstance(value, (*_PLAIN, Tensor)):
            things.append(value)

    for part in module.modules():
        things.append(part)
        gather({name: value for name, value in part.__dict__.items() if name not in _NOT_ASKED})
    return things


def _strides(tensor: Any) -> Any:
    return tensor.stride() if isinstance(tensor, Tensor) else None


# ---------------------------------------------------------------------------------------------- tensors besides weights


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that a module holds and that is neither parameter nor buffer, by the attribute that holds it, if one does."""

    tensor: Tensor
    holder: nn.Module | None = None
    attribute: str = ""

    def now(self) -> Tensor:
        """What the attribute holds, which may be another tensor than at the last call."""
        return self.tensor if self.holder is None else self.holder.__dict__[self.attribute]


def constants_of(module: nn.Module, graph: Graph) -> Mapping[Value, Constant]:
    """Where the module holds each constant of a graph of it."""
    held = {id(v): (part, name) for part in module.modules() for name, v in part.__dict__.items() if isinstance(v, Tensor)}
    return {value: Constant(tensor, *held.get(id(tensor), ())) for value, tensor in graph.constants}
