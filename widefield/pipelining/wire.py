"""How a value travels between stages: contiguous, in the order in which it lies in memory, as a float that wants a gradient.

Torch's pipelines send a gradient back for everything that they sent on, and older ones take every input for a float that wants
one.  So a value without gradient (indices of a pooling, a mask) travels as the float whose bits it is, and gets zeros back.

On tiles in space each rank sends its own tile to the rank that has the same place in the next stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.geometry.layout import Layout
from widefield.tiled.api import as_tile, own_tile
from widefield.tiled.partial_gradient import plain_value
from widefield.tiled.redistribute import inverse
from widefield.tiled.tensor import TiledTensor

_FLOATS = {2: torch.float16, 4: torch.float32, 8: torch.float64}
"""Floats by their bytes."""


def wire_dtype(value: Value) -> torch.dtype:
    """What a value travels as."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return value.dtype
    return _FLOATS.get(value.dtype.itemsize, torch.float16)


def wire_meta(value: Value, layout: Layout | None = None) -> Tensor:
    """A tensor without memory like what travels.  layout: how a value in tiles is cut; None for a plain one."""
    sizes = value.shape if layout is None else layout.tile_shape
    shape = [sizes[dim] for dim in value.order]
    return torch.empty(shape, dtype=wire_dtype(value), device="meta", requires_grad=True)


def on_wire(tensor: Tensor, value: Value, layout: Layout | None = None) -> Tensor:
    """What is sent of a value.  A leaf, where the value has no gradient."""
    assert (type(tensor) is TiledTensor) == (layout is not None), f"{value} was to come {layout or 'plain'}"
    tensor = tensor if layout is None else own_tile(tensor, layout)
    packed = tensor if value.order == tuple(range(tensor.ndim)) else tensor.permute(value.order)
    packed = packed.contiguous()
    if value.wants_grad:
        return packed
    packed = packed.detach()
    if packed.dtype.is_floating_point or packed.dtype.is_complex:
        return packed.requires_grad_(torch.is_grad_enabled())
    narrow = packed.dtype.itemsize == 1  # bytes are exact in float16, and no float that trains is as narrow
    packed = packed.to(torch.float16) if narrow else packed.view(wire_dtype(value))
    return packed.requires_grad_(torch.is_grad_enabled())


def off_wire(tensor: Tensor, value: Value, layout: Layout | None = None) -> Tensor:
    """The value that was sent as `tensor`."""
    received = _unpacked(tensor, value)
    return received if layout is None else as_tile(received, layout)


def _unpacked(tensor: Tensor, value: Value) -> Tensor:
    if value.wants_grad:
        return _Received.apply(tensor, value.order)
    tensor = tensor.detach()
    if tensor.dtype != value.dtype:
        tensor = tensor.to(value.dtype) if value.dtype.itemsize == 1 else tensor.view(value.dtype)
    return tensor.permute(inverse(value.order))


class _Received(torch.autograd.Function):
    """A received tensor with its dims in place; its gradient goes back contiguous, as messages are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Sequence[int]) -> Tensor:
        ctx.order = order
        return tensor.permute(inverse(order))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return plain_value(grad).permute(ctx.order).contiguous(), None


def with_zeros_for(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """`output`, through which `inputs` get a gradient of zeros: each must have one to send back."""
    return _Joined.apply(output, *inputs) if inputs and torch.is_grad_enabled() else output


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.likes = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        ctx.devices = [tensor.device for tensor in inputs]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(like.shape, dtype=like.dtype, device=at) for like, at in zip(ctx.likes, ctx.devices, strict=True)]
        return grad, *zeros


def together(values: Sequence[Tensor]) -> list[Tensor]:
    """The values, as what one node of autograd gives: its backward begins when the gradients of all are there.

    Else a GPU's thread begins with whichever came first, which may be another one on each rank that has a tile of them; their
    messages would be mixed up.
    """
    return list(_Together.apply(*values)) if len(values) > 1 and torch.is_grad_enabled() else list(values)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
