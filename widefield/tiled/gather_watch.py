"""Records which operations gather a cut tensor on every rank, during a forward that is watched.

Where an operation needs a dim whole and its cut can move nowhere else, tiles are gathered; only a run shows where.  What a
model gathers itself, by `widefield.whole`, is not recorded.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from widefield.fallback import Fallback, Kind
from widefield.module_paths import ModulePaths
from widefield.private_torch.autograd import current_graph_task_id
from widefield.tiled.tensor import TiledTensor

_WATCHES: list[GatherWatch] = []
_DISPATCH = TiledTensor.__torch_dispatch__.__func__.__code__  # type: ignore[attr-defined]


SMALLEST_BYTES = 2**12
"""Tensors with fewer bytes, as a number per channel, are not recorded: their messages cost no more than latency."""


class GatherWatch:
    """`with GatherWatch(model) as watch:` around a forward, on every rank; `watch.found` then lists what was gathered."""

    def __init__(self, model: nn.Module) -> None:
        self.paths, self.found = ModulePaths(model), list[Fallback]()

    def __enter__(self) -> GatherWatch:
        _WATCHES.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _WATCHES.remove(self)


def note_gathered(tensor: TiledTensor, operation: str = "", why: str = "its rule wants the whole of a tensor") -> None:
    """Record that a cut tensor is gathered on every rank; operation: "" for the one that runs now."""
    if _WATCHES:
        _note("gathered", tensor, operation, why)


def note_drawn(tensor: TiledTensor) -> None:
    """Record that every rank draws random numbers for the whole of a cut tensor."""
    if _WATCHES:
        _note("drawn whole", tensor, "", "")


def _note(kind: Kind, tensor: TiledTensor, operation: str, why: str) -> None:
    size = tensor.numel() * tensor.dtype.itemsize
    if size < SMALLEST_BYTES or current_graph_task_id() != -1:  # a backward
        return
    name = operation or _operation()
    if not name:  # the model asked for it
        return
    for watch in _WATCHES:
        watch.found.append(Fallback(kind, watch.paths.running(), name, size, why))


def _operation() -> str:
    """The name of the running operation on tiled tensors, the outermost if one calls others; "" for none."""
    frame: types.FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        if frame.f_code is _DISPATCH:
            name = frame.f_locals["func"].overloadpacket.__name__
        frame = frame.f_back
    return name
