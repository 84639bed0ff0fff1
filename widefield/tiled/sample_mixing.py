"""Finds operations that mix the samples of a batch, or that treat samples differently by their index in it.

The batch is cut into tiles, a rank per part, and operations are watched: where samples mix, a rule exchanges pixels between
ranks with different samples.  Comparing values would not do: in a maximum, or where a normalization cancels what was mixed, a
part of the batch may happen to give the whole batch's numbers.  Operations that depend on a sample's index, as one that clamps
the first sample, may exchange nothing; they are found by their arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.comm import halo
from widefield.geometry.layout import Grid
from widefield.private_torch.dispatcher import OpOverload, TorchDispatchMode
from widefield.tiled.pointwise import is_pointwise
from widefield.tiled.replicated_ops import tensors_in
from widefield.tiled.tensor import TiledTensor

VIEWS = {"aten.view", "aten._unsafe_view", "aten.reshape"}
"""Operations by which several samples may come to share a row, without any being dropped."""
ROW_BY_ROW = {"linear", "aten.native_group_norm", "aten.native_layer_norm"} | VIEWS
"""Operations that mix no samples if these are rows of the first dim, though their rules may exchange something."""
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
"""Products: they mix no samples if only one factor has samples, and the sum is not over them."""


def name_of(func: Any) -> str:
    """`aten.mean.dim`, or a function's own name."""
    name = str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", str(func))
    return name.removesuffix(".default")


def may_mix(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation that exchanged something may mix samples, by its kind and the dims of its arguments."""
    name = name_of(func)
    if name in VIEWS or isinstance(func, OpOverload) and torch.Tag.pointwise in func.tags:
        return False
    if name not in ROW_BY_ROW | PRODUCTS:
        return True
    summed = [
        (tensor, dims)
        for place, tensor in enumerate(args)
        if type(tensor) is TiledTensor and (dims := _dims_summed(name, args, place)) is not None
    ]
    return len(summed) > 1 or any(_dim_of_samples(tensor) in dims for tensor, dims in summed)


def _dims_summed(name: str, args: Sequence[Any], place: int) -> Collection[int] | None:
    """The dims of the argument `place` over which a norm or a product sums; None for a norm's weight or bias."""
    ndim, of_norm = args[place].ndim, "norm" in name
    if of_norm and place:
        return None
    if name == "aten.native_group_norm":
        return range(1, ndim)
    if name == "aten.native_layer_norm":
        return range(ndim - len(args[1]), ndim)
    if name == "linear":
        return {ndim - 1} if place < 2 else set()
    left = 1 if name in ("aten.addmm", "aten.baddbmm") else 0  # after the bias
    return {ndim - 1} if place == left else {ndim - 2} if place == left + 1 else set()


def _bounds(tensor: TiledTensor) -> tuple[int, ...] | None:
    """The bounds of the ranks' samples; None where samples are not cut along one dim."""
    dim = _dim_of_samples(tensor)
    cut = None if dim is None else tensor.tile_layout.cuts[dim]
    return None if cut is None else cut.bounds[:: tensor.tile_layout.grid.num_shards(cut.axes[1:])]


def _dim_of_samples(tensor: TiledTensor) -> int | None:
    return next((dim for dim, cut in enumerate(tensor.tile_layout.cuts) if cut is not None and cut.axes[0] == 0), None)


def leaves_some_out(func: Any, tiled: Sequence[TiledTensor], made: Any) -> bool:
    """Whether a result has not the same number of rows for every sample, as where the first sample is selected."""
    of = {bounds for tensor in tiled if (bounds := _bounds(tensor)) is not None}
    if len(of) != 1:
        return False
    (mine,) = of
    for out in tensors_in((made,), {}):
        theirs = _bounds(out) if type(out) is TiledTensor else None
        if theirs is None or not mine[-1]:
            continue
        if len(theirs) != len(mine) or any(a * mine[-1] != b * theirs[-1] for a, b in zip(theirs, mine, strict=True)):
            return True
        if theirs[-1] < mine[-1] and name_of(func) not in VIEWS:
            return True
    return False


def tells_samples_apart(func: Any, args: tuple) -> bool:
    """Whether an operation treats samples differently by their index in the batch.

    Or whether its backward depends on the batch, as that of an embedding which scales gradients by frequency.
    """
    if not isinstance(func, OpOverload):
        return False
    dims = [(x.ndim, dim) for x in args if type(x) is TiledTensor and (dim := _dim_of_samples(x)) is not None]
    name = func.overloadpacket.__name__
    if name.rstrip("_") in ("tril", "triu"):
        return any(dim >= ndim - 2 for ndim, dim in dims[:1])
    if name.startswith("masked_scatter"):  # the values for a sample depend on how many the samples before it took
        return bool(dims)
    if name.startswith(("embedding", "_embedding_bag")):
        return bool(dims) and len(args) > 3 and args[3] is True
    if name == "slice_scatter":
        return any(dim == (args[2] if len(args) > 2 else 0) % ndim for ndim, dim in dims[:1])
    plain = [x for x in args if isinstance(x, Tensor) and type(x) is not TiledTensor] if is_pointwise(func) else []
    return any(_differs_along(x, dim - ndim) for x in plain for ndim, dim in dims)


def _differs_along(plain: Tensor, dim: int) -> bool:
    """Whether the rows along a (negative) dim are not all equal."""
    if plain.is_meta or plain.ndim < -dim or plain.shape[dim] < 2:
        return False
    first = plain.narrow(dim, 0, 1)
    return not bool(((plain == first) | (plain != plain) & (first != first)).all())


def _reduces_samples(func: Any, tiled: Sequence[TiledTensor], made: Any) -> bool:
    """Whether a reduction's result has not a row for each row of what it read."""
    if not (isinstance(func, OpOverload) and torch.Tag.reduction in func.tags):
        return False
    rows = {len(tensor) for tensor in tiled if tensor.ndim and tensor.tile_layout.is_cut}  # uncut ones have no rows of samples
    return bool(rows) and any(not out.ndim or len(out) not in rows for out in tensors_in((made,), {}))


def _is_cut_by_samples(tensor: TiledTensor) -> bool:
    """Whether a tensor's first dim is cut over the samples' axis; rules may have moved that cut to another dim."""
    cut = tensor.tile_layout.cuts[0] if tensor.ndim else None
    return cut is not None and cut.axes[0] == 0


class SampleMixingWatch(TorchDispatchMode):
    """A mode that records in `found` the operations that mix samples, which are cut over the first axis of `grid`, or that
    treat them differently by their index in the batch."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid, self.found = grid, dict[str, None]()
        self._each = grid.size // grid.sizes[0]
        self._whole = grid.group_name(tuple(range(len(grid.sizes))))
        self._between = {name for axes, name in grid.groups if 0 in axes}
        self._has_sent = False

    def __enter__(self) -> SampleMixingWatch:
        halo.LISTENERS.append(self._hear)
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        halo.LISTENERS.remove(self._hear)
        super().__exit__(*error)

    def _hear(self, group_name: str, peers: Sequence[int] | None) -> None:
        """Called for every message of a group; peers: their ranks in it, None for all."""
        if peers is not None and group_name == self._whole:
            here = self.grid.index // self._each
            self._has_sent |= any(peer // self._each != here for peer in peers)
        else:
            self._has_sent |= group_name in self._between

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._has_sent = False
        tiled = [tensor for tensor in tensors_in(args, kwargs or {}) if type(tensor) is TiledTensor]
        if tiled and tells_samples_apart(func, args):  # before it runs, for on cut samples it may be refused
            self.found[name_of(func)] = None
        made = func(*args, **(kwargs or {}))
        # A rank with all samples of its pixels could mix them without a message, so there the result's shape must do.
        of_rows = all(map(_is_cut_by_samples, tiled))
        mixes = self._has_sent and may_mix(func, args) if of_rows else _reduces_samples(func, tiled, made)
        if tiled and (mixes or leaves_some_out(func, tiled, made)):
            self.found[name_of(func)] = None
        return made
