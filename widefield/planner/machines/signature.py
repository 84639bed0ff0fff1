"""A recorded operation's signature as a call that can be timed, on random data.

A signature is (name, args, kwargs): the aten operation with its overload, arguments with each tensor as
("tensor", shape, strides, dtype), and pairs of keyword and argument.  dtypes, devices, layouts and memory formats are their
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.planner.machines.gpu_calls import gpu_function

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """An operation with arguments.  tensors: those of the arguments, lists' too."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        return list(_tensors((self.args, list(self.kwargs.values()))))


def call_of(signature: Hashable, device: torch.device) -> Call | None:
    """The call, with new tensors of random numbers on `device`; None: the signature is not one that can be rebuilt."""
    try:
        name, described, pairs = _parts(signature)
        args = tuple(_value(one, device) for one in described)
        if "max_pool" in name and "backward" in name:
            _spread(args[-1], args[1])
        if device.type == "cuda" and (other := gpu_function(name, args)) is not None:
            return Call(*other, {})
        return Call(operation(name), args, {key: _value(one, device) for key, one in pairs})
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None


def _parts(signature: Any) -> tuple[str, tuple, tuple]:
    """Name, arguments, pairs of keyword and argument.  TypeError, ValueError: these are not its parts."""
    name, args, *rest = signature
    return name, args, rest[0] if rest else ()


def operation(name: str) -> Callable[..., Any]:
    """`aten.add.Tensor`.  AttributeError: there is none."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _value(described: Any, device: torch.device) -> Any:
    if isinstance(described, tuple):
        if len(described) == 4 and described[0] == "tensor":
            return _tensor(described[1], described[2], getattr(torch, described[3]), device)
        return [_value(one, device) for one in described]
    if isinstance(described, str):
        return _word(described, device)
    return described


def _word(text: str, device: torch.device) -> Any:
    """A dtype, layout, memory format or device by its text; another text as it is."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."), text)
    return device if text.split(":")[0] in ("cpu", "cuda", "meta") else text


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers; integers are 0, which is a class and an index that exists everywhere."""
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return _filled(tensor)
    return tensor.zero_()


def _spread(indices: Tensor, image: Tensor) -> None:
    """Where a pooling finds its maxima: each in another place of the image, as on data; gradients of one place would wait."""
    pixels, found = image.shape[2:].numel(), indices.shape[2:].numel()
    places = torch.arange(found, device=indices.device) * pixels // max(1, found)
    indices.copy_(places.view(indices.shape[2:]).expand(indices.shape))


def _filled(tensor: Tensor) -> Tensor:
    """Numbers between 0 and 1, none of which are so small that arithmetic on them is slow; expanded dims hold one number."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        one = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        one.uniform_(0.1, 1)
    else:
        tensor.uniform_(0.1, 1)
    return tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
