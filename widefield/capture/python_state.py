"""A snapshot of the Python state that a forward can read, and whether that state has changed.

A forward reads more than its inputs and weights: numbers, lists and objects in attributes of modules, globals, closures,
default arguments, attributes of classes.  A `PythonState` is a snapshot of everything reachable from some roots; see
capture/objects.py for what is a thing and what is a leaf.

Tensors are leaves.  Their shape, dtype, device, strides and requires_grad count, and which references are to the same tensor.
Tensors that a program looks up by name (weights, and attributes of modules) may be replaced by others with the same properties;
of any other tensor the identity counts.

`holds` runs at every call, so it compares flat lists in C: 0.3 ms for a ResNet-50.  `key` compares two states by value, though
they consist of different objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from widefield.capture.objects import (
    CLASS,
    DICT,
    FIXED,
    FUNCTION,
    MEMBERS,
    OBJECT,
    ORDERED,
    PLAIN,
    ROW,
    SET,
    Kind,
    is_generator,
    kind_of,
)  # fmt: skip
from widefield.private_torch.fake_tensors import is_captured
from widefield.private_torch.modules import MODULE_MEMBERS

MOST = 200_000
"""Largest number of children of all things in a state."""
ARRAY_MOST = 64 * 2**20
"""Largest NumPy array in bytes; arrays are compared at every call."""
_LOOKS = attrgetter("shape", "dtype", "device", "requires_grad")


class Thing(NamedTuple):
    """An object and its children.  parent: the index of the thing that refers to it, or -1 for a root.

    label: what follows the parent's path in this thing's path; of a root, its path.
    """

    what: Any
    kind: Kind
    names: list[Any]
    children: list[Any]
    parent: int
    label: str


class PythonState:
    """A snapshot of everything that is reachable from `roots`, pairs of path and object.

    registered: the `id`s of the modules whose weights and tensor attributes a program looks up by name.
    NotImplementedError: too much is reachable to be compared at every call, or an object does not tell whether it changed.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]] = (), *, registered: Collection[int] = ()) -> None:
        self.things: list[Thing] = []
        self.tensors: list[Tensor] = []
        self.looks: list[tuple] = []
        """The properties of `tensors`; `strides` has their strides."""
        self.strides: list[Any] = []
        self.fakes: list[tuple[str, Tensor]] = []
        """Fake tensors of a capture, with their paths."""
        self.generators: list[tuple[str, Any]] = []
        self.caches: list[tuple[str, Any]] = []
        """Functions with a cache of functools, with their paths."""
        self.objects: list[Any] = []
        self.classes: list[type] = []
        """The classes of `objects`."""
        self.functions: dict[Any, list[Any]] = {}
        """Functions by their code."""
        self._registered = registered
        self._at: dict[int, Any] = {}
        """The token of each object that was reached, by its `id`."""
        self._tokens: list[Any] = []
        self._leaves: list[Any] = []
        self._arrays: list[tuple[np.ndarray, bytes, str]] = []
        self._count = 0
        self._flat: _Flat | None = None
        for path, root in roots:
            self.add(path, root)

    def add(self, path: str, root: Any) -> None:
        """Add a root in its present state; the snapshot of what was reached before stays."""
        self._flat = None
        first = len(self.things)
        self._tokens.append(self._token(root, -1, path))
        while first < len(self.things):
            self._visit(first)
            first += 1

    # ------------------------------------------------------------------------------------------ traversal

    def _visit(self, number: int) -> None:
        what, kind, names, children, *_ = self.things[number]
        self._count += len(children)
        if self._count > MOST:
            raise NotImplementedError(
                f"{self.path(number)} and what the forward's modules and globals hold besides is more than {MOST} Python "
                "values, and each call would have to see whether one of them changed; hold them in tensors, or where the "
                "forward cannot reach them"
            )
        if kind is FUNCTION:
            self.functions.setdefault(what.__code__, []).append(what)
        self._tokens.append(id(kind))
        if kind is OBJECT:
            self.objects.append(what)
            self.classes.append(type(what))
            self._tokens.append(self._token(type(what), number, ""))
        elif kind in (DICT, ROW) and type(what) not in _EXACT and hasattr(what, "__dict__"):
            self._tokens.append(self._token(vars(what), number, " attributes"))
        elif kind is CLASS:
            self._tokens += [self._token(parent, number, "") for parent in what.__mro__[1:]]
        is_member = kind is MEMBERS or (id(what) in self._registered and kind is OBJECT)
        for place, child in enumerate(children):
            name = names[place] if names else place
            if names:
                self._tokens.append(name if type(name) is str else self._token(name, number, ""))
            members = is_member and kind is OBJECT and name in MODULE_MEMBERS
            self._tokens.append(self._token(child, number, name, renewed=is_member, members=members))

    def _token(self, thing: Any, parent: int, name: Any, *, renewed: bool = False, members: bool = False) -> Any:
        """A child's entry in the key; a new thing is appended to `things`, to be visited."""
        kind = type(thing)
        if kind is str:
            return thing
        if kind in PLAIN:
            return kind, thing.hex() if kind is float else thing
        known = self._at.get(id(thing))
        if isinstance(thing, Tensor):
            return self._token_of_tensor(thing, known, parent, name, renewed)
        return self._token_of_new(thing, parent, name, members) if known is None else known

    def _token_of_new(self, thing: Any, parent: int, name: Any, members: bool) -> Any:
        label = name if parent < 0 else self.things[parent].kind.label(name)
        if isinstance(thing, np.generic):
            return thing.dtype.str, thing.tobytes()
        if type(thing) is np.ndarray or isinstance(thing, np.ndarray):
            return self._token_of_array(thing, parent, label)
        kind = MEMBERS if members else kind_of(thing)
        if is_generator(type(thing)):
            self.generators.append((self._joined(parent, label), thing))
        if kind is None:
            self._leaves.append(thing)
            return "is", id(thing)
        if isinstance(thing, functools._lru_cache_wrapper):
            self.caches.append((self._joined(parent, label), thing))
        if kind in (CLASS, FUNCTION):
            parent, label = -1, thing.__qualname__
        self._at[id(thing)] = token = ("thing", len(self.things))
        self.things.append(Thing(thing, kind, *kind.read(thing), parent, label))
        return token

    def _token_of_tensor(self, tensor: Tensor, known: Any, parent: int, name: Any, renewed: bool) -> Any:
        if is_captured(tensor):
            label = name if parent < 0 else self.things[parent].kind.label(name)
            self.fakes.append((self._joined(parent, label), tensor))
            return "is", id(tensor)
        if known is None:
            known = self._at[id(tensor)] = ("tensor", len(self.tensors))
            self.tensors.append(tensor)
            self.looks.append(_LOOKS(tensor))
            self.strides.append(_strides(tensor))
            self._tokens.append((type(tensor), *self.looks[-1], self.strides[-1]))
        return known if renewed else (*known, id(tensor))

    def _token_of_array(self, array: np.ndarray, parent: int, label: str) -> Any:
        path = self._joined(parent, label)
        if array.dtype.hasobject or array.nbytes > ARRAY_MOST:
            raise NotImplementedError(
                f"{path} is a NumPy array of {array.dtype}, {list(array.shape)}, {array.nbytes} bytes, and each call would "
                f"have to see whether a number in it changed, which is done for up to {ARRAY_MOST} bytes of numbers; hold it "
                "as a tensor"
            )
        numbers = array.tobytes()
        self._at[id(array)] = token = ("array", len(self._arrays))
        self._arrays.append((array, numbers, path))
        self._tokens.append((array.dtype.str, array.shape, numbers))
        return token

    # ------------------------------------------------------------------------------------------ comparison

    @property
    def key(self) -> tuple:
        """A tuple that is equal for states with equal values."""
        return tuple(self._tokens)

    def holds(self) -> bool:
        """Whether each thing still has the same children, by identity, and each array the same numbers."""
        if self._flat is None:
            self._flat = _Flat(self)
        return self._flat.holds() and all(array.tobytes() == numbers for array, numbers, _ in self._arrays)

    def changes(self) -> Iterator[str]:
        """The paths of what has changed since the snapshot."""
        for number, (what, kind, names, children, *_) in enumerate(self.things):
            now, found = kind.read(what)
            if not _same(now, names) or not _same(found, children):
                yield self.path(number) + _changed(kind, (names, children), (now, found))
        for array, numbers, path in self._arrays:
            if array.tobytes() != numbers:
                yield path

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for what, kind, names, children, *_ in self.things:
            now, found = kind.read(what)
            if kind.write is not None and not (_same(now, names) and _same(found, children)):
                kind.write(what, names, children)
        for array, numbers, _ in self._arrays:
            array[...] = np.frombuffer(numbers, array.dtype).reshape(array.shape)

    def path(self, number: int) -> str:
        """The expression for a thing, as `Net.blocks[2].scale`."""
        labels = []
        while number >= 0:
            thing = self.things[number]
            labels.append(thing.label)
            number = thing.parent
        return "".join(labels[::-1])

    def _joined(self, parent: int, label: str) -> str:
        return label if parent < 0 else self.path(parent) + label


_EXACT = (dict, list)


def _strides(tensor: Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else None


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _changed(kind: Kind, then: tuple[list, list], now: tuple[list, list]) -> str:
    """The label of the first child that was replaced, added or removed."""
    if not then[0] and not now[0]:
        return ""
    before, after = ({id(name): (name, child) for name, child in zip(*found, strict=True)} for found in (then, now))
    for key in [*after, *before]:
        if key not in before or key not in after or before[key][1] is not after[key][1]:
            return kind.label((after if key in after else before)[key][0])
    return ""


class _Flat:
    """The contents of a state as a few flat lists, for `holds`.

    The lists refer to the objects themselves, so that the `id` of none can be used again for another.
    """

    def __init__(self, state: PythonState) -> None:
        rest = state.things
        self.empty, rest = _sorted(rest, lambda thing: thing.kind in _CONTAINERS and not thing.children)
        dicts, rest = _sorted(rest, _has_dict)
        rows, rest = _sorted(rest, lambda thing: thing.kind in (ROW, SET))
        self.empty = [thing.what for thing in self.empty]
        self.dicts = [thing.what.__dict__ if thing.kind is OBJECT else thing.what for thing in dicts]
        self.rows = [thing.what for thing in rows]
        self.sizes = [len(thing.children) for thing in (*dicts, *rows)]
        self.names = [name for thing in dicts for name in thing.names]
        self.values = [child for thing in dicts for child in thing.children]
        self.entries = [child for thing in rows for child in thing.children]
        self.objects, self.classes = state.objects, state.classes
        self.rest = [thing for thing in rest if thing.kind is not FIXED]
        self.tensors = state.tensors
        self.looks, self.strides = state.looks, [strides for strides in state.strides if strides is not None]
        self.strided = [tensor for tensor, strides in zip(self.tensors, state.strides, strict=True) if strides is not None]

    def holds(self) -> bool:
        merged = chain.from_iterable
        return (
            not any(self.empty)
            and list(map(len, chain(self.dicts, self.rows))) == self.sizes
            and all(map(is_, merged(map(dict.values, self.dicts)), self.values))
            and all(map(is_, merged(map(dict.keys, self.dicts)), self.names))
            and all(map(is_, merged(self.rows), self.entries))
            and list(map(type, self.objects)) == self.classes
            and list(map(_LOOKS, self.tensors)) == self.looks
            and list(map(Tensor.stride, self.strided)) == self.strides
            and all(map(_is_as_it_was, self.rest))
        )


_CONTAINERS = (DICT, MEMBERS, ORDERED, ROW, SET)


def _sorted(things: Iterable[Thing], fits: Callable[[Thing], bool]) -> tuple[list[Thing], list[Thing]]:
    """The things that fit, and the others."""
    found: tuple[list[Thing], list[Thing]] = ([], [])
    for thing in things:
        found[not fits(thing)].append(thing)
    return found


def _has_dict(thing: Thing) -> bool:
    """Whether a thing's children are just the entries of a dict: itself, or its `__dict__`."""
    if thing.kind is not OBJECT:
        return thing.kind in (DICT, MEMBERS)
    own = getattr(thing.what, "__dict__", None)
    return type(own) is dict and list(own) == thing.names


def _is_as_it_was(thing: Thing) -> bool:
    now, found = thing.kind.read(thing.what)
    return _same(now, thing.names) and _same(found, thing.children)
