"""What do operations on tiles in space bring whole to every rank?  Noted in a forward that is watched.

Rules move what they want, and only a run shows it: where no rule can cut a dim, the tiles along it are gathered.  What a model
brings whole itself, by `widefield.whole`, it has asked for.
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
"""Of a tensor that is worth a word: a message of less takes no longer than its start does, as of a number per channel."""


class GatherWatch:
    """`with GatherWatch(model) as watch:` around a forward of `model`, on every rank; then `watch.found`, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.paths, self.found = ModulePaths(model), list[Fallback]()

    def __enter__(self) -> GatherWatch:
        _WATCHES.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _WATCHES.remove(self)


def note_gathered(tensor: TiledTensor, operation: str = "", why: str = "its rule wants the whole of a tensor") -> None:
    """A tensor that is cut is brought whole to every rank, by the operation that runs, unless one is named."""
    if _WATCHES:
        _note("gathered", tensor, operation, why)


def note_drawn(tensor: TiledTensor) -> None:
    """Random numbers are drawn for the whole of a tensor that is cut, of which every rank keeps its tile."""
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
    """The name of the operation on tiled tensors that runs, the outermost where one is made of others; "" where none does."""
    frame: types.FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        if frame.f_code is _DISPATCH:
            name = frame.f_locals["func"].overloadpacket.__name__
        frame = frame.f_back
    return name
