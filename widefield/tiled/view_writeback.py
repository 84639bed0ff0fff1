"""Views whose pixels had to move: writes to them go home, and they fetch again what was written there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Layout
from widefield.private_torch.tensors import is_alias_of, version_counter
from widefield.tiled.redistribute import redistribute, to_layout
from widefield.tiled.schemas import targets_of
from widefield.tiled.tensor import TiledTensor, wrap, wrap_view


def attach_writeback(made: Any, source: Any, layout: Layout, run: Callable) -> None:
    """Tell views that are copies, because pixels had to move, where their pixels belong."""
    source.shown = True
    for number, view in enumerate([made] if isinstance(made, Tensor) else made):
        view.may_alias_data = source.may_alias_data
        view.repeats = source.repeats or _bytes_of(view) > _bytes_of(source)
        if source.tile_layout is layout and is_alias_of(view.local, source.local):
            view.writeback = source.writeback
        else:
            view.writeback = ViewWriteback(source, layout, run, number, view.local)


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


class ViewWriteback:
    """Keeps a moved view and the tensor that it shows the same, whichever of them is written to in place.

    source: the tensor, as it is now: in place it may become one of another shape; layout: where its pixels were brought to
        before `run` showed them; tile: the view's, its `number`th.
    version: the count of writes when they were last the same, see `version_of`.
    """

    def __init__(self, source: TiledTensor, layout: Layout, run: Callable, number: int, tile: Tensor) -> None:
        self.source, self.layout, self.run, self.number, self.local = same_of(source), layout, run, number, tile
        self.version = version_of(source)

    def flush(self, version: int) -> None:
        """Send the view's pixels home, on every rank alike; `version`: the count once this write is counted."""
        source, self.version = self.source, version
        tile = to_layout(source, self.layout).clone(memory_format=torch.contiguous_format)
        shown = self._shown(tile)
        repeated = _repeated_dims(shown)
        _first_of(shown, repeated).copy_(_first_of(self.local, repeated))
        source.local.copy_(redistribute(wrap(tile, self.layout), source.tile_layout))
        if source.writeback is not None:
            source.writeback.flush(version)

    def refresh(self, version: int) -> None:
        """Fetch the pixels again where the tensor was written to since, which all ranks see alike."""
        if version == self.version:
            return
        self.version = version
        if self.source.writeback is not None:
            self.source.writeback.refresh(version)
        shown = self._shown(to_layout(self.source, self.layout))
        repeated = _repeated_dims(self.local)
        _first_of(self.local, repeated).copy_(_first_of(shown, repeated))

    def _shown(self, tile: Tensor) -> Tensor:
        shown = self.run(self.layout, tile)
        return shown if isinstance(shown, Tensor) else shown[self.number]


def _repeated_dims(tile: Tensor) -> list[int]:
    """Dims along which all places share their memory, which cannot be written to more than once."""
    return [dim for dim, step in enumerate(tile.stride()) if step == 0]


def _first_of(tile: Tensor, dims: Sequence[int]) -> Tensor:
    """The first of each of these dims, still a view."""
    for dim in dims:
        tile = tile[(slice(None),) * dim + (slice(0, 1),)]
    return tile


def same_of(tensor: TiledTensor) -> TiledTensor:
    """Another name of a tensor's memory, which stays as it is where the tensor becomes another in place."""
    same = wrap_view(tensor.local, tensor.tile_layout)
    same.writeback = tensor.writeback
    return same


# ---------------------------------------------------------------------------------------------- how often was it written to?


_UNSEEN = [0]
"""Writes to tensors of which torch keeps no count that their views and sources share; all ranks see the same."""


def version_of(tensor: Tensor) -> int:
    """A number that grows whenever the tensor is written to, or a view of the same memory.

    Torch's own count, which a tensor and its views share, and the writes that it does not count: all in the inference mode,
    and those through `.data`.
    """
    return _UNSEEN[0] + (0 if tensor.is_inference() else version_counter(tensor))


def counted(handler: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation that writes into its arguments, and count what torch does not."""
    before = _UNSEEN[0]
    out = handler(func, args, kwargs)
    if any(type(t) is TiledTensor and (t.may_alias_data or t.is_inference()) for t in targets_of(func, args, kwargs)):
        _UNSEEN[0] = max(_UNSEEN[0], before + 1)  # the handler may have run others that write
    return out


def count_write() -> None:
    """Say that a tensor was written to of which torch may keep no count."""
    _UNSEEN[0] += 1
