"""Views that are copies, because pixels had to move: in-place writes to view or source reach the other.

A write to the view is written back at once (`flush`).  A write to the source is noticed by version counters, and the view is
copied again before its next use (`refresh`).
"""

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
    """Give views of `source` their write-back: that of `source` where memory is shared, their own where pixels moved."""
    source.has_views = True
    for number, view in enumerate([made] if isinstance(made, Tensor) else made):
        view.may_alias_data = source.may_alias_data
        view.may_overlap = source.may_overlap or _bytes_of(view) > _bytes_of(source)
        if source.tile_layout is layout and is_alias_of(view.local, source.local):
            view.writeback = source.writeback
        else:
            view.writeback = ViewWriteback(source, layout, run, number, view.local)


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


class ViewWriteback:
    """Keeps a view that is a copy and its source the same, whichever is written to in place.

    source: the viewed tensor.  layout: that to which it was redistributed.  run(layout, tile): the views of such a tile.
    number, tile: which of these the view is, and its tile.
    version: the count of writes when view and source were last the same, see `version_of`.
    """

    def __init__(self, source: TiledTensor, layout: Layout, run: Callable, number: int, tile: Tensor) -> None:
        self.source, self.layout, self.run, self.number, self.local = stable_alias(source), layout, run, number, tile
        self.version = version_of(source)

    def flush(self, version: int) -> None:
        """Write the view's pixels back to the source, on every rank.  version: the count of writes that includes this one."""
        source, self.version = self.source, version
        tile = to_layout(source, self.layout).clone(memory_format=torch.contiguous_format)
        view = self._view_of(tile)
        repeated = _repeated_dims(view)
        _first_of(view, repeated).copy_(_first_of(self.local, repeated))
        source.local.copy_(redistribute(wrap(tile, self.layout), source.tile_layout))
        if source.writeback is not None:
            source.writeback.flush(version)

    def refresh(self, version: int) -> None:
        """Copy the source again if it was written to since; ranks agree on that, for all of them count the same writes."""
        if version == self.version:
            return
        self.version = version
        if self.source.writeback is not None:
            self.source.writeback.refresh(version)
        view = self._view_of(to_layout(self.source, self.layout))
        repeated = _repeated_dims(self.local)
        _first_of(self.local, repeated).copy_(_first_of(view, repeated))

    def _view_of(self, tile: Tensor) -> Tensor:
        views = self.run(self.layout, tile)
        return views if isinstance(views, Tensor) else views[self.number]


def _repeated_dims(tile: Tensor) -> list[int]:
    """Dims of stride 0, all of whose elements share memory; copy_ refuses to write to them."""
    return [dim for dim, step in enumerate(tile.stride()) if step == 0]


def _first_of(tile: Tensor, dims: Sequence[int]) -> Tensor:
    """The view of the first element along each of these dims."""
    for dim in dims:
        tile = tile[(slice(None),) * dim + (slice(0, 1),)]
    return tile


def stable_alias(tensor: TiledTensor) -> TiledTensor:
    """Another tensor of the same memory, which keeps its shape and layout if operations change those of `tensor` in place."""
    alias = wrap_view(tensor.local, tensor.tile_layout)
    alias.writeback = tensor.writeback
    return alias


# ---------------------------------------------------------------------------------------------- counting writes


_UNSEEN = [0]
"""The number of writes that torch's version counters miss; the same on every rank."""


def version_of(tensor: Tensor) -> int:
    """A number that grows with every in-place write to the tensor or to a view of it.

    It is torch's version counter, which a tensor shares with its views, plus the writes that this misses: all in inference
    mode, and those through `.data`.
    """
    return _UNSEEN[0] + (0 if tensor.is_inference() else version_counter(tensor))


def counted(handler: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation that writes into its arguments, and count the write if torch's counters miss it."""
    before = _UNSEEN[0]
    out = handler(func, args, kwargs)
    if any(type(t) is TiledTensor and (t.may_alias_data or t.is_inference()) for t in targets_of(func, args, kwargs)):
        _UNSEEN[0] = max(_UNSEEN[0], before + 1)  # the handler may have run others that write
    return out


def count_write() -> None:
    """Count a write that torch's version counters may miss."""
    _UNSEEN[0] += 1
