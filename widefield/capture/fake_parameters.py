"""Fake tensors in place of a module's parameters and buffers, while it is captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widefield.geometry.strides import strides_like
from widefield.private_torch.fake_tensors import FunctionalTensor
from widefield.private_torch.modules import buffers_of, parameters_of, parametrize_cache, set_parametrize_cache
from widefield.private_torch.pytree import tree_leaves


def name_of(module: nn.Module) -> str:
    """The name of a module's own class."""
    return type(module).__name__.removeprefix("Streamed")


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass(frozen=True)
class Like:
    """The description of a tensor, in place of one where a module is captured."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    requires_grad: bool = False
    read: None = None
    """By this attribute `is_tensor` knows stand-ins for tensors."""

    @classmethod
    def of(cls, tensor: Tensor | Like, device: torch.device | None = None, shape: tuple[int, ...] | None = None) -> Like:
        """The description of a tensor; optionally on another device, or with another shape in the same memory format."""
        strides, shape = tuple(tensor.stride()), tuple(tensor.shape) if shape is None else shape
        if shape != tuple(tensor.shape):
            strides = strides_like(shape, strides)
        return cls(shape, tensor.dtype, device or tensor.device, strides, tensor.requires_grad)

    @classmethod
    def whole(cls, part: Tensor | Like, shape: tuple[int, ...], strides: tuple[int, ...]) -> Like:
        """The description of a full tensor of which `part` is a shard."""
        return cls(shape, part.dtype, part.device, strides, part.requires_grad)

    def stride(self) -> tuple[int, ...]:
        return self.strides


def is_tensor(leaf: Any) -> bool:
    """Whether an argument is a tensor or a stand-in for one: a Like or a WindowedImage."""
    return isinstance(leaf, Tensor) or (hasattr(leaf, "shape") and hasattr(leaf, "read"))


def tensors_of(arguments: Any) -> list[Any]:
    """The tensors among a module's arguments, in order."""
    return [leaf for leaf in tree_leaves(arguments) if is_tensor(leaf)]


@contextmanager
def with_weights(module: nn.Module, fakes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, `fakes` are in place of parameters and buffers, under all of their names.

    `torch.func.functional_call` would leave its tensors behind in modules that are registered under several names.
    NotImplementedError, at the end: the forward has replaced a parameter or buffer.
    """
    places = [registry for part in module.modules() for registry in (parameters_of(part), buffers_of(part))]
    before = [dict(registry) for registry in places]
    for registry in places:
        registry.update({name: fakes[tensor] for name, tensor in registry.items() if tensor is not None})
    given = [dict(registry) for registry in places]
    try:
        yield
        if any(_changed(a, b) for a, b in zip(places, given, strict=True)):
            raise NotImplementedError(
                f"{name_of(module)} cannot be streamed: its forward puts new tensors in place of its buffers; "
                "write to them in place, as buffer.copy_(value) does"
            )
    finally:
        for registry, values in zip(places, before, strict=True):
            registry.clear()
            registry.update(values)


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """Inside, Tensor.register_hook raises: such a hook would be called in the capture only."""

    def refuse(tensor: Tensor, *_: Any) -> None:
        raise NotImplementedError(
            f"a hook is registered on a tensor of {list(tensor.shape)} inside of the forward, and a stream makes that "
            "tensor tile after tile; register it on the stream's output, or on a parameter"
        )

    FunctionalTensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FunctionalTensor.register_hook


@contextmanager
def without_weights_cache() -> Iterator[None]:
    """Inside, the cache of `torch.nn.utils.parametrize.cached()` is empty; else it would keep weights made of fake tensors."""
    before = parametrize_cache()
    set_parametrize_cache((0, {}))
    try:
        yield
    finally:
        set_parametrize_cache(before)


def refuse_scripts(module: nn.Module, aim: str) -> None:
    """NotImplementedError if a part of a module is TorchScript, whose state cannot be seen from Python."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"{name_of(module)} cannot be {aim}: {f'its part {name}' if name else 'it'} is a torch.jit.ScriptModule, whose "
                "numbers may change unseen; leave out torch.jit.script and torch.jit.trace"
            )


def _changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return now.keys() != then.keys() or any(now[name] is not then[name] for name in now)
