"""What stands in for a module's weights while it is followed, and what is put back afterwards."""

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
    """Of the class that the user wrote."""
    return type(module).__name__.removeprefix("Streamed")


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass(frozen=True)
class Like:
    """What a tensor looks like; stands for one where a module is followed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    requires_grad: bool = False
    read: None = None
    """As every stand-in of a tensor has it."""

    @classmethod
    def of(cls, tensor: Tensor | Like, device: torch.device | None = None, shape: tuple[int, ...] | None = None) -> Like:
        """As a tensor, or as it would be on another device, or of another shape with its dims in the same order in memory."""
        strides, shape = tuple(tensor.stride()), tuple(tensor.shape) if shape is None else shape
        if shape != tuple(tensor.shape):
            strides = strides_like(shape, strides)
        return cls(shape, tensor.dtype, device or tensor.device, strides, tensor.requires_grad)

    @classmethod
    def whole(cls, part: Tensor | Like, shape: tuple[int, ...], strides: tuple[int, ...]) -> Like:
        """As the whole of which a rank holds a part."""
        return cls(shape, part.dtype, part.device, strides, part.requires_grad)

    def stride(self) -> tuple[int, ...]:
        return self.strides


def is_tensor(leaf: Any) -> bool:
    """Whether an argument is a tensor or stands for one, as a Reader does."""
    return isinstance(leaf, Tensor) or (hasattr(leaf, "shape") and hasattr(leaf, "read"))


def tensors_of(arguments: Any) -> list[Any]:
    """The tensors among a module's arguments, in order."""
    return [leaf for leaf in tree_leaves(arguments) if is_tensor(leaf)]


@contextmanager
def with_weights(module: nn.Module, fakes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Fake tensors in place of parameters and buffers, wherever and however often a module holds them.

    Torch's own `functional_call` would leave its tensors behind in modules that are registered under several names.
    """
    places = [held for part in module.modules() for held in (parameters_of(part), buffers_of(part))]
    before = [dict(held) for held in places]
    for held in places:
        held.update({name: fakes[tensor] for name, tensor in held.items() if tensor is not None})
    given = [dict(held) for held in places]
    try:
        yield
        if any(_changed(a, b) for a, b in zip(places, given, strict=True)):
            raise NotImplementedError(
                f"{name_of(module)} cannot be streamed: its forward puts new tensors in place of its buffers; "
                "write to them in place, as buffer.copy_(value) does"
            )
    finally:
        for held, values in zip(places, before, strict=True):
            held.clear()
            held.update(values)


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """A hook on a tensor inside of the module would be asked while it is followed, and never again."""

    def refuse(tensor: Tensor, *_: Any) -> None:
        raise NotImplementedError(
            f"a hook is registered on a tensor of {list(tensor.shape)} inside of the forward, and a stream makes that "
            f"tensor tile after "
            "tile; register it on the stream's output, or on a parameter"
        )

    FunctionalTensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FunctionalTensor.register_hook


@contextmanager
def without_weights_cache() -> Iterator[None]:
    """`torch.nn.utils.parametrize.cached()` around a call would go on to give weights that are made of fake ones."""
    before = parametrize_cache()
    set_parametrize_cache((0, {}))
    try:
        yield
    finally:
        set_parametrize_cache(before)


def refuse_scripts(module: nn.Module, aim: str) -> None:
    """NotImplementedError where a part of a module is TorchScript, whose state Python does not see."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"{name_of(module)} cannot be {aim}: {f'its part {name}' if name else 'it'} is a torch.jit.ScriptModule, whose "
                "numbers may change unseen; leave out torch.jit.script and torch.jit.trace"
            )


def _changed(held: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return held.keys() != given.keys() or any(held[name] is not given[name] for name in held)
