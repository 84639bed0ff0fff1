"""The contents of Python objects: for each kind of object, how its children are read, restored and named in messages.

A *thing* is an object that can change, or that refers to objects that can.  All others are *leaves*: numbers, texts, and
objects of which only the identity counts, such as those of torch and the standard library.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from widefield.module_wrapping import is_private
from widefield.private_torch.modules import MODULE_MEMBERS
from widefield.rooms import ENGINE_MODULES

Children = tuple[list[Any], list[Any]]
"""Names and their objects; no names for sequences and sets."""

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose objects are immutable and compared by value."""

_FOREIGN = ("numpy", "torch", *ENGINE_MODULES, "builtins")
"""Packages whose functions and classes are assumed not to change, with the standard library."""
_OPAQUE = (
    "numpy", "torch._", "torch.autograd", "torch.cuda", "torch.distributed", "torch.fx", "torch.jit", "torch.multiprocessing",
    "torch.utils", *ENGINE_MODULES, "builtins",
)  # fmt: skip
"""Packages whose objects are leaves, as are the standard library's except for those in _OPEN."""
_OPEN = ("argparse", "collections", "functools", "types", "_thread")
_MISSING = object()


@dataclass(frozen=True, eq=False)
class Kind:
    """How objects of one kind are read and restored.  label: the text for a child, after its thing's path."""

    read: Callable[[Any], Children]
    write: Callable[[Any, list[Any], list[Any]], None] | None
    """None for immutable objects, whose children may still change."""
    label: Callable[[Any], str]


@dataclass(frozen=True)
class Name:
    """A name in a namespace, such as a global of a Python module."""

    space: dict[str, Any]
    name: str

    def __hash__(self) -> int:
        return hash((id(self.space), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self.space is other.space and self.name == other.name

    def __str__(self) -> str:
        return f"the global {self.name} of {self.space.get('__name__', 'a namespace')}"


# ---------------------------------------------------------------------------------------------- reading and restoring


def _put_in_dict(thing: dict, names: list[Any], children: list[Any]) -> None:
    thing.clear()
    thing.update(zip(names, children, strict=True))


def _put_in_row(thing: Any, _: list[Any], children: list[Any]) -> None:
    thing.clear()
    thing.extend(children)


def _put_in_set(thing: set, _: list[Any], children: list[Any]) -> None:
    thing.clear()
    thing.update(children)


def _slots(thing: Any) -> list[str]:
    found = [slot for kind in type(thing).__mro__ for slot in _listed(vars(kind).get("__slots__", ()))]
    return [slot for slot in found if slot not in ("__dict__", "__weakref__") and hasattr(thing, slot)]


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_object(thing: Any) -> Children:
    own = getattr(thing, "__dict__", {})
    names, slots = [name for name in own if not is_private(name)], _slots(thing)
    return [*names, *slots], [*(own[name] for name in names), *(getattr(thing, slot) for slot in slots)]


def _put_in_object(thing: Any, names: list[Any], children: list[Any]) -> None:
    """Bypasses __setattr__, which a class may override."""
    attributes, slots = dict(zip(names, children, strict=True)), set(_slots(thing))
    for slot in slots & attributes.keys():
        object.__setattr__(thing, slot, attributes.pop(slot))
    own = getattr(thing, "__dict__", None)
    if own is not None:
        private = {name: value for name, value in own.items() if is_private(name)}
        _put_in_dict(own, [*attributes, *private], [*attributes.values(), *private.values()])


_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")


def _of_function(thing: Any) -> Children:
    cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
    named = [(name, cell) for name, cell in cells if name != "__class__"]
    return [*_PARTS, *(name for name, _ in named)], [*(getattr(thing, part) for part in _PARTS), *(cell for _, cell in named)]


def _put_in_function(thing: Any, names: list[Any], children: list[Any]) -> None:
    for name, child in zip(names, children, strict=True):
        if name in _PARTS and getattr(thing, name) is not child:
            setattr(thing, name, child)


def _of_cell(thing: Any) -> Children:
    try:
        return [], [thing.cell_contents]
    except ValueError:  # nothing is in it yet
        return [], [_MISSING]


def _put_in_cell(thing: Any, _: list[Any], children: list[Any]) -> None:
    if children[0] is not _MISSING:
        thing.cell_contents = children[0]


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute of a class is compared: functions, and anything without a dunder name."""
    return isinstance(value, types.FunctionType) or not (name.startswith("__") or name == "_abc_impl")


def _of_class(thing: type) -> Children:
    attributes = {name: value for name, value in vars(thing).items() if _counts(name, value)}
    return list(attributes), list(attributes.values())


def _put_in_class(thing: type, names: list[Any], children: list[Any]) -> None:
    for name in set(_of_class(thing)[0]) - set(names):
        delattr(thing, name)
    for name, child in zip(names, children, strict=True):
        if vars(thing).get(name, _MISSING) is not child:
            setattr(thing, name, child)


def _put_in_name(thing: Name, _: list[Any], children: list[Any]) -> None:
    if children[0] is _MISSING:
        thing.space.pop(thing.name, None)
    else:
        thing.space[thing.name] = children[0]


def _put_in_variable(thing: ContextVar, _: list[Any], children: list[Any]) -> None:
    if children[0] is not _MISSING:
        thing.set(children[0])


def _of_iterator(thing: Any) -> Children:
    """What an iterator goes through and how far it is, without a step of it.  NotImplementedError: it does not tell."""
    if isinstance(thing, types.GeneratorType):
        frame = thing.gi_frame
        found = [] if frame is None else [frame.f_lasti, thing.gi_yieldfrom, *frame.f_locals.values()]
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # itertools' own, of Python 3.12
                _, *found = thing.__reduce__()
        except TypeError as error:
            raise NotImplementedError(
                f"what a forward can see holds a {type(thing).__name__}, which is used up as it is read and does not tell how "
                "far; hold a list and a number in its place"
            ) from error
    return [], [sys.intern(repr(child)) if type(child) in PLAIN else child for child in _flat(found)]


def _flat(found: list[Any]) -> list[Any]:
    return [part for child in found for part in (_flat(list(child)) if type(child) is tuple else [child])]


def _entry(name: Any) -> str:
    return f"[{name!r}]"


def _attribute(name: Any) -> str:
    return "" if name in MODULE_MEMBERS else f".{name}"


_IN_WORDS = dict(zip(_PARTS, ("code", "default arguments", "keyword-only default arguments", "attributes"), strict=True))


def _of_a_function(name: Any) -> str:
    return f"'s {_IN_WORDS.get(name, f'closure over {name}')}"


def _nothing(_: Any) -> str:
    return ""


DICT = Kind(lambda d: (list(dict.keys(d)), list(dict.values(d))), _put_in_dict, _entry)
ORDERED = Kind(lambda d: (list(d), list(d.values())), _put_in_dict, _entry)
MEMBERS = Kind(DICT.read, _put_in_dict, lambda name: f".{name}")
ROW = Kind(lambda row: ([], list(row)), _put_in_row, _entry)
SET = Kind(lambda thing: ([], list(thing)), _put_in_set, _entry)
FIXED = Kind(lambda thing: ([], list(thing)), None, _entry)
PROXY = Kind(lambda thing: (list(thing), list(thing.values())), None, _entry)
OBJECT = Kind(_of_object, _put_in_object, _attribute)
FUNCTION = Kind(_of_function, _put_in_function, _of_a_function)
CELL = Kind(_of_cell, _put_in_cell, _nothing)
CLASS = Kind(_of_class, _put_in_class, _attribute)
NAME = Kind(lambda place: ([], [place.space.get(place.name, _MISSING)]), _put_in_name, _nothing)
VARIABLE = Kind(lambda variable: ([], [variable.get(_MISSING)]), _put_in_variable, _nothing)
METHOD = Kind(lambda method: ([], [method.__func__, method.__self__]), None, _nothing)
PARTIAL = Kind(lambda part: (["func", "args", "keywords"], [part.func, part.args, part.keywords]), None, _attribute)
PROPERTY = Kind(lambda thing: ([], [thing.fget, thing.fset]), None, _nothing)
WRAPPED = Kind(lambda thing: ([], [thing.__wrapped__]), None, _nothing)
REFERENCE = Kind(lambda thing: ([], [thing()]), None, _nothing)
ITERATOR = Kind(_of_iterator, None, _nothing)
OPTIMIZER = Kind(lambda optimizer: (["param_groups"], [optimizer.param_groups]), None, _attribute)


# ---------------------------------------------------------------------------------------------- the kind of an object

_KINDS: dict[type, Kind] = {
    dict: DICT, OrderedDict: ORDERED, list: ROW, deque: ROW, set: SET, tuple: FIXED, frozenset: FIXED, torch.Size: FIXED,
    types.MappingProxyType: PROXY, types.FunctionType: FUNCTION, types.CellType: CELL, types.MethodType: METHOD,
    functools.partial: PARTIAL, property: PROPERTY, classmethod: WRAPPED, staticmethod: WRAPPED,
    functools._lru_cache_wrapper: WRAPPED, weakref.ref: REFERENCE, ContextVar: VARIABLE, Name: NAME,
}  # fmt: skip
_SUBCLASSED = (
    (OrderedDict, ORDERED), (dict, DICT), (list, ROW), (deque, ROW), (set, SET), (tuple, FIXED), (frozenset, FIXED),
    (nn.Module, OBJECT), (threading.local, OBJECT), (functools.partial, PARTIAL), (torch.optim.Optimizer, OPTIMIZER),
)  # fmt: skip
_LEAVES = (Enum, types.ModuleType, types.CodeType, np.ndarray, np.generic, torch.Tensor, *PLAIN)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def is_generator(kind: type) -> bool:
    """Whether objects of a class draw random numbers."""
    return issubclass(kind, _GENERATORS)


def kind_of(thing: Any) -> Kind | None:
    """The kind of an object; None for a leaf."""
    kind = type(thing)
    if kind is types.FunctionType:
        return None if is_foreign(thing.__module__) else FUNCTION
    found = _KINDS.get(kind, _MISSING)
    if found is _MISSING:
        found = _KINDS[kind] = _kind_of_class(kind)  # type: ignore[assignment]
    if found is CLASS:
        return None if is_foreign(thing.__module__) or issubclass(thing, Enum) else CLASS
    return found  # type: ignore[return-value]


def _kind_of_class(kind: type) -> Kind | None:
    if issubclass(kind, type):
        return CLASS
    if issubclass(kind, _LEAVES) or is_generator(kind):
        return None
    for parent, found in _SUBCLASSED:
        if issubclass(kind, parent):
            return found
    if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return ITERATOR
    return None if _within(kind.__module__, _OPAQUE) or _is_standard(kind.__module__) else OBJECT


def is_foreign(module: Any) -> bool:
    """Whether a Python module belongs to torch, NumPy, the standard library or widefield, by its name."""
    return type(module) is str and (_within(module, _FOREIGN) or _is_standard(module))


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package if package[-1] == "_" else f"{package}.") for package in packages)


def _is_standard(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in _OPEN and top != "__main__"
