"""Does an operation mix the samples of a batch?  Rules send something between ranks that have different samples where it may.

A value alone does not show it: where samples meet in a step, in a maximum or in what a normalization takes out again, the
numbers of one batch may be those that a part of it gives.  And where samples are told apart by their number in the batch, as
where its first one is clamped, other samples are taken in each part of it, and a rule may send nothing.
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
"""Operations that make fewer rows of samples without leaving any out: several samples' numbers come to lie in one."""
ROW_BY_ROW = {"linear", "aten.native_group_norm", "aten.native_layer_norm"} | VIEWS
"""Operations that mix no samples whose rows lie along a first dim, though rules may send something for them: sums of groups,
rows that come to lie elsewhere."""
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
"""Those that mix none as long as one factor alone is made of samples, and is not added up over them."""


def name_of(func: Any) -> str:
    """`aten.mean.dim`, or a function's own name."""
    name = str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", str(func))
    return name.removesuffix(".default")


def may_mix(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation for which ranks talk mixes samples, as far as its kind and the dims of its arguments tell."""
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
    """Over which dims of the tensor at `place` a norm or a product adds up; None of a tensor that only scales or shifts."""
    ndim, of_norm = args[place].ndim, "norm" in name
    if of_norm and place:
        return None
    if name == "aten.native_group_norm":
        return range(1, ndim)
    if name == "aten.native_layer_norm":
        return range(ndim - len(args[1]), ndim)
    if name == "linear":
        return {ndim - 1} if place < 2 else set()
    left = 1 if name in ("aten.addmm", "aten.baddbmm") else 0  # behind what is added
    return {ndim - 1} if place == left else {ndim - 2} if place == left + 1 else set()


def _bounds(tensor: TiledTensor) -> tuple[int, ...] | None:
    """Of each rank's samples, along the dim where they lie; None where samples are not cut, or not one after another."""
    dim = _dim_of_samples(tensor)
    cut = None if dim is None else tensor.tile_layout.cuts[dim]
    return None if cut is None else cut.bounds[:: tensor.tile_layout.grid.num_shards(cut.axes[1:])]


def _dim_of_samples(tensor: TiledTensor) -> int | None:
    return next((dim for dim, cut in enumerate(tensor.tile_layout.cuts) if cut is not None and cut.axes[0] == 0), None)


def leaves_some_out(func: Any, tiled: Sequence[TiledTensor], made: Any) -> bool:
    """Whether some ranks' samples have more rows in a result than others', as where the first sample of a batch is taken."""
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
    """Whether an operation does something else to some rows of samples than to others, by their number in the batch.

    Or its backward, as that of an embedding which counts how often the batch asks for a row.
    """
    if not isinstance(func, OpOverload):
        return False
    dims = [(x.ndim, dim) for x in args if type(x) is TiledTensor and (dim := _dim_of_samples(x)) is not None]
    name = func.overloadpacket.__name__
    if name.rstrip("_") in ("tril", "triu"):
        return any(dim >= ndim - 2 for ndim, dim in dims[:1])
    if name.startswith("masked_scatter"):  # which numbers it takes depends on how many the samples before have taken
        return bool(dims)
    if name.startswith(("embedding", "_embedding_bag")):
        return bool(dims) and len(args) > 3 and args[3] is True
    if name == "slice_scatter":
        return any(dim == (args[2] if len(args) > 2 else 0) % ndim for ndim, dim in dims[:1])
    plain = [x for x in args if isinstance(x, Tensor) and type(x) is not TiledTensor] if is_pointwise(func) else []
    return any(_differs_along(x, dim - ndim) for x in plain for ndim, dim in dims)


def _differs_along(plain: Tensor, dim: int) -> bool:
    """Whether rows along a dim, counted from the last, are not all the same."""
    if plain.is_meta or plain.ndim < -dim or plain.shape[dim] < 2:
        return False
    first = plain.narrow(dim, 0, 1)
    return not bool(((plain == first) | (plain != plain) & (first != first)).all())


def _takes_them_together(func: Any, tiled: Sequence[TiledTensor], made: Any) -> bool:
    """Whether a reduction gives something that has no longer a row for each row of what it read."""
    if not (isinstance(func, OpOverload) and torch.Tag.reduction in func.tags):
        return False
    rows = {
        len(tensor) for tensor in tiled if tensor.ndim and tensor.tile_layout.is_cut
    }  # else of no sample, or of all already
    return bool(rows) and any(not out.ndim or len(out) not in rows for out in tensors_in((made,), {}))


def _lies_by_samples(tensor: TiledTensor) -> bool:
    """Whether ranks have their samples' rows; rules may cut a batch along other dims, and what is sent then says little."""
    cut = tensor.tile_layout.cuts[0] if tensor.ndim else None
    return cut is not None and cut.axes[0] == 0


class SampleMixingWatch(TorchDispatchMode):
    """Inside, `found` gets the names of operations that mix samples which lie along the first axis of `grid`, or that tell
    them apart by their number in the batch, which in a copy's part of it is another."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid, self.found = grid, dict[str, None]()
        self._each = grid.size // grid.sizes[0]
        self._whole = grid.group_name(tuple(range(len(grid.sizes))))
        self._between = {name for axes, name in grid.groups if 0 in axes}
        self._has_talked = False

    def __enter__(self) -> SampleMixingWatch:
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
        tiled = [tensor for tensor in tensors_in(args, kwargs or {}) if type(tensor) is TiledTensor]
        if tiled and tells_samples_apart(func, args):  # before it runs, for on rows it may be refused
            self.found[name_of(func)] = None
        made = func(*args, **(kwargs or {}))
        of_rows = all(map(_lies_by_samples, tiled))  # else a rank may have all samples of what it has, and need no message
        mixes = self._has_talked and may_mix(func, args) if of_rows else _takes_them_together(func, tiled, made)
        if tiled and (mixes or leaves_some_out(func, tiled, made)):
            self.found[name_of(func)] = None
        return made
