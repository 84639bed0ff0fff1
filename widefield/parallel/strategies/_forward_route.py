"""Runs code around a model's forward while the model stays the same object, with the same names and no hooks in its copies.

Calls can be watched, before and after, or be routed to a wrapper of the model.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from widefield.private_torch.modules import call_impl_of, compiled_call_impl_of

_WRAPPER, _WATCHED, _INSIDE = "_widefield_wrapper", "_widefield_watched", "_widefield_inside"


@dataclass
class Watched:
    """Functions called around the outermost forward of a model, in order: `before(model)`, `after(model, output)`."""

    before: list[Callable[[nn.Module], None]] = field(default_factory=list)
    around: Callable[[nn.Module, Callable[..., Any], tuple, dict], Any] | None = None
    """`around(model, forward, args, kwargs)` runs the forward and returns its output."""
    after: list[Callable[[nn.Module, Any], None]] = field(default_factory=list)


class Inside(nn.Module):
    """The module that a wrapper wraps: the model's own forward, without its hooks, which run once outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(_Routed, self.model).forward(*args, **kwargs)  # type: ignore[misc]


class Compiled:
    """A compiled forward; `uncompiled` runs the same without the compiler."""

    def __init__(self, call: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.call, self.uncompiled = call, torch.compiler.disable(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Routed(nn.Module):
    """Put before the model's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """For a compiled model, run what is around the forward uncompiled, so that the compiler sees only the forward."""
        is_compiled = compiled_call_impl_of(self) is not None and not torch.compiler.is_compiling()
        if is_compiled and not getattr(self, _INSIDE, False):
            return self._run_watched(Compiled(super().__call__, call_impl_of(super())), args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _INSIDE, False):  # a model may call itself
            return super().forward(*args, **kwargs)
        wrapper = self.__dict__.get(_WRAPPER)
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs) if wrapper is not None else _uncompiled(self, super().forward, args, kwargs)
        run = super().forward if wrapper is None or not (self.training and torch.is_grad_enabled()) else wrapper
        return self._run_watched(run, args, kwargs)

    def _run_watched(self, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        watched: Watched = self.__dict__.get(_WATCHED) or Watched()
        for call in watched.before:
            call(self)
        self.__dict__[_INSIDE] = True
        try:
            around = watched.around
            output = run(*args, **kwargs) if around is None else around(self, run, args, kwargs)
        finally:
            self.__dict__[_INSIDE] = False
        for look in watched.after:
            look(self, output)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is a module of the model's own class, copied as that class does."""
        kinds = type(self).__mro__
        kind: Any = kinds[kinds.index(_Routed) + 1]
        plain = kind.__new__(kind)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key not in (_WRAPPER, _WATCHED, _INSIDE)})
        made, *rest = plain.__reduce_ex__(protocol)
        return _new if made is copyreg.__newobj__ else made, *rest  # type: ignore[attr-defined]  # pickle wants that of its own class


@torch.compiler.disable
def _uncompiled(model: _Routed, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run the forward of a model that is called inside of compiled code, with what is around it, uncompiled."""
    warnings.warn(
        f"{type(model).__qualname__} is parallelized and runs uncompiled inside of torch.compile, which does not see "
        "the messages between ranks; call model.compile() on it in place of torch.compile(model)",
        stacklevel=2,
    )
    return model._run_watched(run, args, kwargs)


def _new(kind: type[nn.Module], *args: Any) -> nn.Module:
    return kind.__new__(kind, *args)


def watch(model: nn.Module) -> Watched:
    """Make `model`'s forward watched; returns a new, empty Watched to fill.

    They are not called where a forward is set on the object, which hides that of the class.
    """
    model.__class__ = _routed_kind(type(model))
    watched = model.__dict__[_WATCHED] = Watched()
    return watched


def is_inside(model: nn.Module) -> bool:
    """Whether the forward of a watched model is running."""
    return vars(model).get(_INSIDE, False)


def inside(model: nn.Module) -> Inside:
    """The module to wrap in place of `model`; then `route` calls to the wrapper."""
    if "forward" in vars(model):
        raise NotImplementedError(
            f"{type(model).__qualname__} has a forward set on the object, which hides the parallel one; "
            "give its class that forward"
        )
    model.__class__ = _routed_kind(type(model))
    return Inside(model)


def route(model: nn.Module, wrapper: nn.Module) -> None:
    """From now on `model(...)` runs `wrapper(...)` in training."""
    model.__dict__[_WRAPPER] = wrapper  # not as a submodule: names, train() and state_dict() stay the model's


_KINDS: dict[type, type] = {}


def _routed_kind(kind: type) -> type:
    if issubclass(kind, _Routed):
        return kind
    if kind not in _KINDS:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _KINDS[kind] = type(kind.__name__, (_Routed, kind), names)
    return _KINDS[kind]
