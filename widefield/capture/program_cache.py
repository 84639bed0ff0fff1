"""The captured programs of a module, and which of them is valid for a call.

A program depends on the call's arguments, on torch's modes, and on all Python state that the forward can read: the attributes
of the module, and the globals, closures and default arguments of its code, which the capture found.  If any of these has
changed, the module is captured again.
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
"""The largest number of programs of a module, for images of a new size in every step; the least recently used is dropped."""
RECAPTURES_MOST = 8
"""Captures in a row for arguments that were seen before, after which a warning says what has changed."""
Cached = TypeVar("Cached")


@dataclass
class _Entry(Generic[Cached]):
    """A program, and the state that the forward could see.  things: arguments that are neither tensors nor plain values."""

    key: tuple
    things: list[Any]
    guards: Guards
    state: PythonState
    made: Cached


class ProgramCache(Generic[Cached]):
    """The last MOST programs of a module, most recently used first."""

    def __init__(self) -> None:
        self._entries: list[_Entry[Cached]] = []
        self._recaptures = 0

    def get(self, module: nn.Module, args: tuple, kwargs: dict, make: Callable[[Guards], Cached], *more: Any) -> Cached:
        """The program for this call, or a new one from `make(guards)`, which captures the module and fills the guards.

        more: hashable values that a program depends on as well.
        """
        key, things = _key(module, args, kwargs)
        key = (*more, *key)
        entries = [entry for entry in self._entries if entry.key == key]
        entry = next((e for e in entries if _same(e.things, things) and e.state.holds()), None)
        entry = entry or next(_equal_entries(module, things, entries), None)
        if entry is None:
            self._warn_of_recaptures(module, entries)
            guards = Guards()
            made = make(guards)
            if not guards.is_stable:  # the first call has changed the state, so the next one is captured again
                return made
            entry = _Entry(key, things, guards, _state(module, things, guards), made)
        else:
            self._recaptures = 0
            self._entries.remove(entry)
        self._entries = [entry, *self._entries][:MOST]
        return entry.made

    def _warn_of_recaptures(self, module: nn.Module, entries: list[_Entry[Cached]]) -> None:
        """Warn, once, if a module is captured in every call."""
        self._recaptures = self._recaptures + 1 if entries else 0
        if self._recaptures == RECAPTURES_MOST:
            changed = next(entries[0].state.changes(), "what it is given")
            warnings.warn(
                f"{name_of(module)} was captured anew in each of its last {RECAPTURES_MOST} calls, since {changed} changed; "
                "the numbers are right, but a capture takes as long as many calls: hold what changes in a buffer, or in a "
                "tensor that is a module's attribute",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[Cached]:
        """The programs, the most recently used last."""
        return [entry.made for entry in reversed(self._entries)]


def _equal_entries(module: nn.Module, things: list[Any], entries: list[_Entry[Cached]]) -> Iterator[_Entry[Cached]]:
    """The entries whose state equals the present one, though it consists of other objects."""
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
    """A key of the arguments and torch's modes, and the arguments that are neither tensors nor plain values."""
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
    """A tensor of a module that is neither parameter nor buffer, with the submodule and attribute that refer to it, if any."""

    tensor: Tensor
    owner: nn.Module | None = None
    attribute: str = ""

    def now(self) -> Tensor:
        """The present tensor of the attribute, which may be another one than at the capture."""
        return self.tensor if self.owner is None else self.owner.__dict__[self.attribute]


def constants_of(module: nn.Module, graph: Graph) -> Mapping[Value, Constant]:
    """The Constant of each constant value of a graph of `module`."""
    owners = {id(v): (part, name) for part in module.modules() for name, v in part.__dict__.items() if isinstance(v, Tensor)}
    return {value: Constant(tensor, *owners.get(id(tensor), ())) for value, tensor in graph.constants}
