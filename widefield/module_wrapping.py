"""Calling a module runs something of ours, and yet it stays the object it was: a class of ours is put before its own.

Several may be put before one module, one after another.  What is ours of a module is its class, and attributes with private
names.  A copy or a pickle is made by the module's own class as if we were not there, whatever that class says of copying, and
has of ours what `COPIED` names.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from torch import nn


class Wrapping(nn.Module):
    """Put before a module's own class by `wrap_class`; a subclass says what a call runs."""

    COPIED: ClassVar[tuple[str, ...]] = ()
    """The attributes that a copy has, which then is of this class too; none: a copy knows nothing of this class."""
    PREFIX: ClassVar[str] = ""
    """Of the name of the class that a module has afterwards."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kinds, held = _copied(self)
        with _as_its_own(self):
            reduced = self.__reduce_ex__(protocol)  # of the module's own class
            if isinstance(reduced, str):
                return reduced
            make, args, state, *rest = *reduced, *[None] * (3 - len(reduced))
            state = _apart(state, self.__dict__)
        return _rebuilt, (make, args, kinds, held), state, *rest


def wrap_class(module: nn.Module, ours: type[Wrapping]) -> None:
    """Put a class of ours before the module's own, where it is not there yet."""
    if not isinstance(module, ours):
        module.__class__ = _wrapped(ours, type(module))


def is_private(name: Any) -> bool:
    """Whether an attribute of a module is ours."""
    return type(name) is str and name.startswith(("_widefield_", "_stream"))


@cache
def _wrapped(ours: type[Wrapping], theirs: type) -> type:
    names: dict[str, Any] = {"__module__": theirs.__module__, "__doc__": theirs.__doc__, "__slots__": ()}
    names["__qualname__"] = f"{ours.PREFIX}{theirs.__qualname__}"
    if hasattr(theirs, "__deepcopy__"):
        names["__deepcopy__"] = _deepcopied
    return types.new_class(f"{ours.PREFIX}{theirs.__name__}", (ours, theirs), exec_body=lambda space: space.update(names))


def _apart(state: Any, held: dict[str, Any]) -> Any:
    """A state with what `held` holds now, where it refers to that."""
    if type(state) is tuple:
        return tuple(_apart(part, held) for part in state)
    return dict(held) if state is held else state


def _deepcopied(module: nn.Module, memo: dict) -> Any:
    """By the module's own class, which has its own way."""
    kinds, held = _copied(module)
    with _as_its_own(module):
        found = module.__deepcopy__(memo)  # type: ignore[operator]
    return _as_ours(found, kinds, copy.deepcopy(held, memo))


def _copied(module: nn.Module) -> tuple[list[type[Wrapping]], dict[str, Any]]:
    """The classes of ours that a copy has, outermost first, and their attributes."""
    kinds = [kind for kind in type(module).__mro__ if vars(kind).get("COPIED")]
    return kinds, {name: vars(module)[name] for kind in kinds for name in kind.COPIED if name in vars(module)}


@contextmanager
def _as_its_own(module: nn.Module) -> Iterator[None]:
    """Inside, a module is of its own class, without what is ours."""
    kinds, held = type(module).__mro__, vars(module)
    before, private = type(module), {name: held[name] for name in held if is_private(name)}
    module.__class__ = kinds[kinds.index(Wrapping) + 1]
    for name in private:
        del held[name]
    try:
        yield
    finally:
        module.__class__ = before
        held.update(private)


def _rebuilt(make: Any, args: tuple, kinds: list[type[Wrapping]], held: dict[str, Any]) -> Any:
    """What copies and pickles begin with: an empty module."""
    return _as_ours(make(*args), kinds, held)


def _as_ours(module: Any, kinds: list[type[Wrapping]], held: dict[str, Any]) -> Any:
    for kind in reversed(kinds):
        wrap_class(module, kind)
    vars(module).update(held)
    return module
