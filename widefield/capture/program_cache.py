"""What was made for the calls of a module so far, and on what of a call that depends.

On its arguments, torch's modes, and on all that the forward can see in Python: what the module holds, and the globals, closures
and default arguments that its code reads, which its capture found.  Where one of these changed, the module is captured again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from widefield.capture.fake_parameters import is_tensor, name_of
from widefield.capture.ir import Graph, Value
from widefield.capture.objects import PLAIN
from widefield.capture.python_state import PythonState
from widefield.capture.python_watch import Guards, roots_of
from widefield.capture.side_effects import seen_by
from widefield.private_torch.pytree import tree_flatten

MOST = 16
"""How many are kept, for images whose size is new in every step."""
AGAIN_MOST = 8
"""Captures in a row for arguments that were known, after which it is said what makes them necessary."""
Cached = TypeVar("Cached")


@dataclass
class _Entry(Generic[Cached]):
    """What was made for a call, and what the forward could see then.  things: the arguments that are no plain values."""

    key: tuple
    things: list[Any]
    guards: Guards
    state: PythonState
    made: Cached


class ProgramCache(Generic[Cached]):
    """What `make` made for each kind of call, the last MOST of them."""

    def __init__(self) -> None:
        self._entries: list[_Entry[Cached]] = []
        self._again = 0

    def get(self, module: nn.Module, args: tuple, kwargs: dict, make: Callable[[Guards], Cached], *more: Any) -> Cached:
        """What is there for this call, else what `make(guards)` gives, which captures the module with these guards.

        more: what it depends on besides.
        """
        key, things = _key(module, args, kwargs)
        key = (*more, *key)
        entries = [entry for entry in self._entries if entry.key == key]
        entry = next((e for e in entries if _same(e.things, things) and e.state.holds()), None)
        entry = entry or next(_alike(module, things, entries), None)
        if entry is None:
            self._tell(module, entries)
            guards = Guards()
            made = make(guards)
            if not guards.is_settled:  # the next call finds another state, and is captured anew
                return made
            entry = _Entry(key, things, guards, _state(module, things, guards), made)
        else:
            self._again = 0
            self._entries.remove(entry)
        self._entries = [entry, *self._entries][:MOST]  # the last one used comes first
        return entry.made

    def _tell(self, module: nn.Module, entries: list[_Entry[Cached]]) -> None:
        """Warn, once, of a module that is captured in every call."""
        self._again = self._again + 1 if entries else 0
        if self._again == AGAIN_MOST:
            changed = next(entries[0].state.changes(), "what it is given")
            warnings.warn(
                f"{name_of(module)} was captured anew in each of its last {AGAIN_MOST} calls, for {changed} was another in "
                "each; the numbers are right, but a capture takes as long as many calls: hold what changes in a buffer, or in "
                "a tensor that is a module's attribute",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[Cached]:
        """What is there, the last one used at the end."""
        return [entry.made for entry in reversed(self._entries)]


def _alike(module: nn.Module, things: list[Any], entries: list[_Entry[Cached]]) -> Iterator[_Entry[Cached]]:
    """Those for which a forward finds the same, though in other objects."""
    for entry in entries:
        state = _state(module, things, entry.guards)
        if state.key == entry.state.key:
            entry.state, entry.things = state, things
            yield entry


def _state(module: nn.Module, things: list[Any], guards: Guards) -> PythonState:
    given = [(f"argument {number}", thing) for number, thing in enumerate(things)]
    return seen_by(module, [*given, *roots_of(guards.places)])


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _key(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, list[Any]]:
    """What the operations of a call depend on, but for pixels, weights' numbers and what is held in Python; and those of the
    arguments that are neither tensors nor plain values."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = tuple(_look(leaf) if is_tensor(leaf) else _plain(leaf) for leaf in leaves)
    things = [leaf for leaf in leaves if type(leaf) not in PLAIN and not is_tensor(leaf)]
    cast = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda"))
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.backends.mha.get_fastpath_enabled()
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return (form, tensors, cast, torch.is_grad_enabled(), module.training, defaults, kernels), things


def _plain(leaf: Any) -> Any:
    return (type(leaf), repr(leaf)) if type(leaf) in PLAIN else "thing"


def _look(tensor: Any) -> tuple:
    strides = tensor.stride() if isinstance(tensor, Tensor) else None
    wants = getattr(tensor, "requires_grad", False)
    return tuple(tensor.shape), tensor.dtype, tensor.device, wants, getattr(tensor, "tile_layout", None), strides


# ---------------------------------------------------------------------------------------------- tensors besides weights


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that a module holds and that is neither parameter nor buffer, by the attribute that holds it, if one does."""

    tensor: Tensor
    spec: nn.Module | None = None
    attribute: str = ""

    def now(self) -> Tensor:
        """What the attribute holds, which may be another tensor than at the last call."""
        return self.tensor if self.spec is None else self.spec.__dict__[self.attribute]


def constants_of(module: nn.Module, graph: Graph) -> Mapping[Value, Constant]:
    """Where the module holds each constant of a graph of it."""
    held = {id(v): (part, name) for part in module.modules() for name, v in part.__dict__.items() if isinstance(v, Tensor)}
    return {value: Constant(tensor, *held.get(id(tensor), ())) for value, tensor in graph.constants}
