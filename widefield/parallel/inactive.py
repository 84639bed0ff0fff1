"""A rank that has no samples left runs a stand-in for them, a ghost, so that the messages of the others find a partner."""

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
    """Inside, this rank's batch is a stand-in that counts nothing: run forward and backward of a rank without samples here.

    SyncBatchNorm adds zero values to the whole's statistics, normalizes the stand-in with them and sends back no gradient;
    any other BatchNorm or InstanceNorm leaves its running statistics alone.  The loss of a stand-in must be multiplied by 0
    for the layers behind the last SyncBatchNorm.  Recomputed activations (checkpointing) need backward inside as well.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NormBase)]
    ours = [layer for layer in layers if isinstance(layer, SyncBatchNorm)]
    others: list[tuple[nn.Module, dict[str, Any]]] = [
        (layer, dict(buffers_of(layer))) for layer in layers if not isinstance(layer, SyncBatchNorm)
    ]
    for sync in ours:
        sync.inactive = True
    _GHOSTS[model] = others
    for other, buffers in others:  # they write into copies, which are dropped
        buffers_of(other).update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for sync in ours:
            del sync.inactive
        for other, buffers in others:
            buffers_of(other).update(buffers)
        _GHOSTS.pop(model, None)


_GHOSTS: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, dict[str, Any]]]] = WeakKeyDictionary()
"""Models whose batch is a stand-in now, and the buffers that they are not to write to."""


def is_inactive(model: nn.Module) -> bool:
    """Whether a model's batch is a stand-in now."""
    return model in _GHOSTS


@contextmanager
def on_rows(model: nn.Module) -> Iterator[None]:
    """Inside, SyncBatchNorms are given rows of a batch that copies share: a stand-in counts, and what is not cut once."""
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
    """Let a stand-in's pass write to the model's own buffers: where copies share a batch, all write the same."""
    others = _GHOSTS[model]
    for layer, buffers in others:
        buffers_of(layer).update(buffers)
    others.clear()
