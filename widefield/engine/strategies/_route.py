"""Calling a model runs a wrapper, and yet the model stays itself: same object, same names, no `module.` before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_WRAPPER = "_widefield_wrapper"


class Inside(nn.Module):
    """What the wrapper wraps: the model's own forward, without the hooks, which run once outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(_Routed, self.model).forward(*args, **kwargs)  # type: ignore[misc]


class _Routed(nn.Module):
    """Mixed in before the model's class: training passes go through the wrapper, others straight to the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self.__dict__.get(_WRAPPER)
        if wrapper is None or not self.training or not torch.is_grad_enabled() or self.__dict__.get("_widefield_inside"):
            return super().forward(*args, **kwargs)
        self.__dict__["_widefield_inside"] = True  # a model may call itself; only the outermost call is a pass
        try:
            return wrapper(*args, **kwargs)
        finally:
            self.__dict__["_widefield_inside"] = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is the plain model, without wrapper."""
        _, _, state, *rest = super().__reduce_ex__(protocol)
        plain = {key: value for key, value in state.items() if not key.startswith("_widefield_")}
        return _new, (type(self).__mro__[2],), plain, *rest


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


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


def wrapper_of(model: nn.Module) -> nn.Module | None:
    """What `model` is routed through; None for a plain model."""
    return vars(model).get(_WRAPPER)


_KINDS: dict[type, type] = {}


def _routed_kind(kind: type) -> type:
    if issubclass(kind, _Routed):
        return kind
    if kind not in _KINDS:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _KINDS[kind] = type(kind.__name__, (_Routed, kind), names)
    return _KINDS[kind]
