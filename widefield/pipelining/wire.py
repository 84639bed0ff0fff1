"""How a value is sent to another stage: contiguous, its dims in memory order, as a float tensor that requires a gradient.

torch's pipelines send a gradient back for every tensor that they sent, and older releases treat every input as a float that
requires one.  So a value without gradient (pooling indices, a mask) is sent as a float with the same bits, and gets zeros back.

With tiles in space each rank sends its tile to the rank with the same tile in the next stage.
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
"""Floating-point dtypes by their size in bytes."""


def wire_dtype(value: Value) -> torch.dtype:
    """The dtype in which a value is sent."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return value.dtype
    return _FLOATS.get(value.dtype.itemsize, torch.float16)


def wire_meta(value: Value, layout: Layout | None = None) -> Tensor:
    """A meta tensor like what is sent.  layout: that of a tiled value; None for a plain one."""
    sizes = value.shape if layout is None else layout.tile_shape
    shape = [sizes[dim] for dim in value.order]
    return torch.empty(shape, dtype=wire_dtype(value), device="meta", requires_grad=True)


def on_wire(tensor: Tensor, value: Value, layout: Layout | None = None) -> Tensor:
    """Pack a value to be sent.  If it has no gradient, the result is a leaf of autograd."""
    assert (type(tensor) is TiledTensor) == (layout is not None), f"{value} was to come {layout or 'plain'}"
    tensor = tensor if layout is None else own_tile(tensor, layout)
    packed = tensor if value.order == tuple(range(tensor.ndim)) else tensor.permute(value.order)
    packed = packed.contiguous()
    if value.wants_grad:
        return packed
    packed = packed.detach()
    if packed.dtype.is_floating_point or packed.dtype.is_complex:
        return packed.requires_grad_(torch.is_grad_enabled())
    narrow = packed.dtype.itemsize == 1  # float16 represents all bytes exactly; there is no trainable dtype of one byte
    packed = packed.to(torch.float16) if narrow else packed.view(wire_dtype(value))
    return packed.requires_grad_(torch.is_grad_enabled())


def off_wire(tensor: Tensor, value: Value, layout: Layout | None = None) -> Tensor:
    """Unpack a received value."""
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
    """A received tensor with its dims in their own order; the gradient is sent back packed and contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Sequence[int]) -> Tensor:
        ctx.order = order
        return tensor.permute(inverse(order))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return plain_value(grad).permute(ctx.order).contiguous(), None


def with_zeros_for(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """`output`, with a backward that gives `inputs` gradients of zeros, since a stage sends one back for each input."""
    return _WithZeros.apply(output, *inputs) if inputs and torch.is_grad_enabled() else output


class _WithZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.likes = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        ctx.devices = [tensor.device for tensor in inputs]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(like.shape, dtype=like.dtype, device=at) for like, at in zip(ctx.likes, ctx.devices, strict=True)]
        return grad, *zeros


def as_one_node(values: Sequence[Tensor]) -> list[Tensor]:
    """The values as outputs of a single autograd node, whose backward runs once all their gradients are there.

    Otherwise autograd's thread of a GPU starts with the gradient that comes first.  That may be another one on each rank with a
    tile of the values, and the order of halo messages would differ between ranks.
    """
    return list(_OneNode.apply(*values)) if len(values) > 1 and torch.is_grad_enabled() else list(values)


class _OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
