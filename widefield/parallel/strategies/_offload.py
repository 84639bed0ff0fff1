"""Activations in the CPU's memory until the backward needs them: the two hooks of autograd's saved tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widefield.geometry.layout import Layout
from widefield.private_torch.fake_tensors import is_eager, is_emulated
from widefield.private_torch.tensors import base_of
from widefield.streaming.storage.memory_pool import PLANNED_MEMORY
from widefield.tiled.tensor import TiledTensor, wrap_view

SMALLEST_BYTES = 1024
"""Smaller tensors stay on the device: a transfer would cost more than the memory it frees."""


@dataclass(frozen=True)
class _OffloadedTensor:
    """A tensor, or the local tile of a TiledTensor, in the CPU's memory.  layout: of the TiledTensor."""

    values: Tensor
    device: torch.device
    layout: Layout | None


def to_host(tensor: Tensor) -> Any:
    """What autograd saves in place of an activation; weights and small tensors stay on their device.

    The size of a TiledTensor is that of the whole, so that all ranks choose the same.
    """
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
    tile = tensor.local if type(tensor) is TiledTensor else tensor
    if isinstance(tensor, nn.Parameter):
        return tensor
    if is_weight or tensor.numel() * tensor.element_size() < SMALLEST_BYTES or not is_eager(tile):
        return tensor.detach()  # an operation's output saved by that operation itself would be a reference cycle
    values = _host_memory_like(tile)
    values.copy_(tile.detach(), non_blocking=tile.is_cuda)
    return _OffloadedTensor(values, tile.device, tensor.tile_layout if type(tensor) is TiledTensor else None)


def _host_memory_like(tile: Tensor) -> Tensor:
    """A tensor like `tile` in the CPU's memory, pinned for a GPU."""
    if not is_emulated(tile):
        return torch.empty_like(tile, device="cpu", pin_memory=tile.is_cuda, memory_format=torch.preserve_format)
    strides = torch.empty_like(tile, device="meta", memory_format=torch.preserve_format).stride()
    return PLANNED_MEMORY[-1].make(tile.nbytes, False).view(tile.dtype).as_strided(tile.shape, strides)


def from_host(kept: Any) -> Tensor:
    """The activation on its device, from what `to_host` returned."""
    if not isinstance(kept, _OffloadedTensor):
        return kept
    tile = torch.empty_like(kept.values, device=kept.device).copy_(kept.values, non_blocking=True)
    return tile if kept.layout is None else wrap_view(tile, kept.layout)
