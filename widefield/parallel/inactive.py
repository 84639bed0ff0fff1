"""A rank that has no samples left runs a dummy batch, so that the collectives of the other ranks are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from widefield.private_torch.modules import NormBase, buffers_of
from widefield.tiled.batch_statistics import ARE_ROWS
from widefield.tiled.sync_batch_norm import SyncBatchNorm


@contextmanager
def inactive(model: nn.Module) -> Iterator[None]:
    """Inside, this rank is inactive: its batch is a dummy that changes neither statistics nor gradients.

    Run both forward and backward inside, and multiply the loss by 0, for the layers behind the last SyncBatchNorm.
    A SyncBatchNorm adds nothing to the statistics of the whole batch, normalizes the dummy with them and sends no gradient
    back.  Any other BatchNorm or InstanceNorm leaves its running statistics as they are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NormBase)]
    ours = [layer for layer in layers if isinstance(layer, SyncBatchNorm)]
    others: list[tuple[nn.Module, dict[str, Any]]] = [
        (layer, dict(buffers_of(layer))) for layer in layers if not isinstance(layer, SyncBatchNorm)
    ]
    for sync in ours:
        sync.inactive = True
    _INACTIVE[model] = others
    for other, buffers in others:  # the pass writes into copies, which are dropped
        buffers_of(other).update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for sync in ours:
            del sync.inactive
        for other, buffers in others:
            buffers_of(other).update(buffers)
        _INACTIVE.pop(model, None)


_INACTIVE: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, dict[str, Any]]]] = WeakKeyDictionary()
"""Models that run a dummy batch now, and the buffers that it must not write to."""


def is_inactive(model: nn.Module) -> bool:
    """Whether a model runs a dummy batch now."""
    return model in _INACTIVE


@contextmanager
def on_rows(model: nn.Module) -> Iterator[None]:
    """Inside, the inputs of SyncBatchNorms are rows of a batch that copies share: all rows count, and an uncut input once."""
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)] if is_inactive(model) else []
    for layer in layers:
        layer.inactive = False
    were = ARE_ROWS.set(True)
    try:
        yield
    finally:
        ARE_ROWS.reset(were)
        for layer in layers:
            layer.inactive = True


def real_buffers(model: nn.Module) -> None:
    """Let the pass of a dummy batch write to the model's own buffers: where copies share a batch, all write the same."""
    others = _INACTIVE[model]
    for layer, buffers in others:
        buffers_of(layer).update(buffers)
    others.clear()
