"""Does an operation mix the samples of a batch?  Rules send something between ranks that have different samples where it may.

A value alone does not show it: where samples meet in a step, in a maximum or in what a normalization takes out again, the
numbers of one batch may be those that a part of it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from widefield.engine import halo
from widefield.engine.alike import tensors_in
from widefield.engine.layout import Grid
from widefield.engine.tiled import TiledTensor

ROW_BY_ROW = {"linear", "aten.native_group_norm", "aten.native_layer_norm", "aten.view", "aten._unsafe_view", "aten.reshape"}
"""Operations that mix no samples, though rules may send something for them: sums of groups, rows that come to lie elsewhere."""
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
"""Those that mix none as long as one factor alone is made of samples."""


def name_of(func: Any) -> str:
    """`aten.mean.dim`, or a function's own name."""
    name = str(func) if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))
    return name.removesuffix(".default")


def may_mix(func: Any, of_samples: int) -> bool:
    """Whether an operation for which ranks talk mixes samples, as far as its kind tells.

    of_samples: how many of its tensors are made of samples.
    """
    if isinstance(func, torch._ops.OpOverload) and torch.Tag.pointwise in func.tags:
        return False
    return of_samples > 1 if name_of(func) in PRODUCTS else name_of(func) not in ROW_BY_ROW


def _takes_them_together(func: Any, tiled: Sequence[TiledTensor], made: Any) -> bool:
    """Whether a reduction gives something that has no longer a row for each row of what it read."""
    if not (isinstance(func, torch._ops.OpOverload) and torch.Tag.reduction in func.tags):
        return False
    rows = {len(tensor) for tensor in tiled if tensor.ndim and tensor.laid.is_cut}  # else of no sample, or of all already
    return bool(rows) and any(not out.ndim or len(out) not in rows for out in tensors_in((made,), {}))


def _lies_by_samples(tensor: TiledTensor) -> bool:
    """Whether ranks have their samples' rows; rules may cut a batch along other dims, and what is sent then says little."""
    cut = tensor.laid.cuts[0] if tensor.ndim else None
    return cut is not None and cut.axes[0] == 0


class Watch(TorchDispatchMode):
    """Inside, `found` gets the names of operations that mix samples which lie along the first axis of `grid`."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid, self.found = grid, dict[str, None]()
        self._each = grid.size // grid.sizes[0]
        self._whole = grid.group_name(tuple(range(len(grid.sizes))))
        self._between = {name for axes, name in grid.groups if 0 in axes}
        self._has_talked = False

    def __enter__(self) -> Watch:
        halo.LISTENERS.append(self._hear)
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        halo.LISTENERS.remove(self._hear)
        super().__exit__(*error)

    def _hear(self, group_name: str, peers: Sequence[int] | None) -> None:
        """A message on a group: to peers by their place in it, or, None, to all."""
        if peers is not None and group_name == self._whole:
            here = self.grid.index // self._each
            self._has_talked |= any(peer // self._each != here for peer in peers)
        else:
            self._has_talked |= group_name in self._between

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._has_talked = False
        made = func(*args, **(kwargs or {}))
        tiled = [tensor for tensor in tensors_in(args, kwargs or {}) if type(tensor) is TiledTensor]
        of_rows = all(map(_lies_by_samples, tiled))  # else a rank may have all samples of what it has, and need no message
        mixes = self._has_talked and may_mix(func, len(tiled)) if of_rows else _takes_them_together(func, tiled, made)
        if tiled and mixes:
            self.found[name_of(func)] = None
        return made
