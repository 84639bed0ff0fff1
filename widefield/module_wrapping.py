"""Changes what a call of a module runs, while the module stays the same object: its class becomes a subclass of its own class.

`wrap_class(module, ours)` sets `module.__class__` to a new class with the bases (ours, the module's class).  This can be
repeated with several classes.  Besides the class, only attributes with private names are added.  Copies and pickles are made
by the module's own class, as if nothing were added; they then get the wrapping classes that name attributes in `COPIED`.
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
    """Base of the classes that `wrap_class` puts before a module's own; a subclass defines what a call runs."""

    COPIED: ClassVar[tuple[str, ...]] = ()
    """Attributes that a copy or pickle gets, which is then wrapped by this class too; if empty, a copy is not wrapped."""
    PREFIX: ClassVar[str] = ""
    """Prefix of the new class's name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kinds, copied = _copied(self)
        with _as_its_own(self):
            reduced = self.__reduce_ex__(protocol)  # of the module's own class
            if isinstance(reduced, str):
                return reduced
            make, args, state, *rest = *reduced, *[None] * (3 - len(reduced))
            state = _without_alias(state, self.__dict__)
        return _rebuilt, (make, args, kinds, copied), state, *rest


def wrap_class(module: nn.Module, ours: type[Wrapping]) -> None:
    """Put the class `ours` before the module's own class in its MRO, unless it is there already."""
    if not isinstance(module, ours):
        module.__class__ = _wrapped(ours, type(module))


def is_private(name: Any) -> bool:
    """Whether an attribute of a module was added by widefield, by its name."""
    return type(name) is str and name.startswith(("_widefield_", "_stream"))


@cache
def _wrapped(ours: type[Wrapping], theirs: type) -> type:
    names: dict[str, Any] = {"__module__": theirs.__module__, "__doc__": theirs.__doc__, "__slots__": ()}
    names["__qualname__"] = f"{ours.PREFIX}{theirs.__qualname__}"
    if hasattr(theirs, "__deepcopy__"):
        names["__deepcopy__"] = _deepcopied
    return types.new_class(f"{ours.PREFIX}{theirs.__name__}", (ours, theirs), exec_body=lambda space: space.update(names))


def _without_alias(state: Any, attributes: dict[str, Any]) -> Any:
    """A reduced state that does not alias the module's `__dict__`, to which the private attributes come back."""
    if type(state) is tuple:
        return tuple(_without_alias(part, attributes) for part in state)
    return dict(attributes) if state is attributes else state


def _deepcopied(module: nn.Module, memo: dict) -> Any:
    """A copy by the module's own `__deepcopy__`."""
    kinds, copied = _copied(module)
    with _as_its_own(module):
        found = module.__deepcopy__(memo)  # type: ignore[operator]
    return _as_ours(found, kinds, copy.deepcopy(copied, memo))


def _copied(module: nn.Module) -> tuple[list[type[Wrapping]], dict[str, Any]]:
    """The wrapping classes that a copy gets, outermost first, and their attributes."""
    kinds = [kind for kind in type(module).__mro__ if vars(kind).get("COPIED")]
    return kinds, {name: vars(module)[name] for kind in kinds for name in kind.COPIED if name in vars(module)}


@contextmanager
def _as_its_own(module: nn.Module) -> Iterator[None]:
    """Inside, the module has its own class and none of the private attributes."""
    kinds, attributes = type(module).__mro__, vars(module)
    before, private = type(module), {name: attributes[name] for name in attributes if is_private(name)}
    module.__class__ = kinds[kinds.index(Wrapping) + 1]
    for name in private:
        del attributes[name]
    try:
        yield
    finally:
        module.__class__ = before
        attributes.update(private)


def _rebuilt(make: Any, args: tuple, kinds: list[type[Wrapping]], copied: dict[str, Any]) -> Any:
    """The first step of a copy or an unpickling: the new module, before its state is set."""
    return _as_ours(make(*args), kinds, copied)


def _as_ours(module: Any, kinds: list[type[Wrapping]], copied: dict[str, Any]) -> Any:
    for kind in reversed(kinds):
        wrap_class(module, kind)
    vars(module).update(copied)
    return module
