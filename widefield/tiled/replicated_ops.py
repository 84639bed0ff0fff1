"""Operations on tensors that every rank has alike: the plain operation, which gives every rank the same.

Where a gradient repeats one value over an image, as that of a mean does, it is computed once and not per pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Grid, uncut
from widefield.private_torch.autograd import current_graph_task_id
from widefield.private_torch.dispatcher import schema_of
from widefield.private_torch.pytree import tree_map
from widefield.rules import PLAIN_OUTPUTS
from widefield.tiled.schemas import targets_of, written_by
from widefield.tiled.tensor import TiledTensor, swap, wrap_uncut, wrap_view
from widefield.tiled.view_writeback import version_of


def on_every_rank(func: Any, args: tuple, kwargs: dict) -> Any:
    """Every tensor is the same on every rank, so the plain operation is, too."""
    grid: Grid | None = None
    given, moved = (args, kwargs), False
    targets: dict[int, TiledTensor] = {}

    def plain(value: Any) -> Any:
        nonlocal grid, moved
        if type(value) is not TiledTensor:
            return value
        if value.writeback is not None:
            moved = True
            value.writeback.refresh(version_of(value))
        grid = value.tile_layout.grid
        targets[id(value.local)] = value
        return value.local

    if any(type(arg) is list for arg in args) or kwargs:
        args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
        out = func(*args, **kwargs)
    else:
        out = func(*[plain(arg) for arg in args])
    keep_plain = PLAIN_OUTPUTS.get(func, ())
    made = out
    if isinstance(out, Tensor):
        made = _written(targets[id(out)]) if id(out) in targets else out if keep_plain else wrap_uncut(out, grid)
    elif isinstance(out, (tuple, list)):
        made = type(out)(
            value
            if number in keep_plain
            else (_written(targets[id(value)]) if id(value) in targets else wrap_uncut(value, grid))
            if isinstance(value, Tensor)
            else value
            for number, value in enumerate(out)
        )
    if moved:
        made = _follow_homes(func, *given, made)
    if func.is_view:
        given[0][0].shown = True
    return made


def _written(target: TiledTensor) -> TiledTensor:
    """A tensor that was written to, which may have taken another shape so."""
    if target.local.shape == target.shape:
        return target
    return swap(target, wrap_view(target.local, uncut(tuple(target.local.shape), target.tile_layout.grid)))


def _follow_homes(func: Any, args: tuple, kwargs: dict, made: Any) -> Any:
    """Of moved views: what was written to them goes home, and what views one belongs there, too."""
    for target in targets_of(func, args, kwargs):
        if type(target) is TiledTensor and target.writeback is not None:
            target.writeback.flush(version_of(target) + 1)
    first = args[0]
    if not func.is_view or written_by(func) or type(first) is not TiledTensor or first.writeback is None:
        return made
    return tree_map(partial(_view_of, first), made)


def _view_of(source: TiledTensor, view: Tensor) -> TiledTensor:
    """A view of a moved view; also one of a single number, to which may be written."""
    view = view if type(view) is TiledTensor else wrap_view(view, uncut((), source.tile_layout.grid))
    view.writeback, view.may_alias_data = source.writeback, source.may_alias_data
    return view


def is_in_place(func: Any) -> bool:
    arguments = schema_of(func).arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors in arguments, those in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


# ---------------------------------------------------------------------------------------------- one value at many places


def on_uncut(func: Any, args: tuple, kwargs: dict) -> Any:
    """Operands that every rank has whole; in a backward once only along dims on which all of them repeat one value.

    The gradient of a mean is spread over all pixels and then divided: an image would be filled with it, on every rank.
    """
    if current_graph_task_id() == -1:  # in a forward the result may be a tensor that the model writes on
        return on_every_rank(func, args, kwargs)
    if kwargs.get("memory_format") is torch.contiguous_format:  # a view is taken of it next that repeated places do not allow
        return on_every_rank(func, args, kwargs)
    tiles = [t.local if type(t) is TiledTensor else t for t in tensors_in(args, kwargs)]
    shape = torch.broadcast_shapes(*(tile.shape for tile in tiles))
    dims = _repeated_dims(tiles, shape)
    if not dims:
        return on_every_rank(func, args, kwargs)
    narrow = partial(_narrowed, dims=dims)
    out = on_every_rank(func, tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()})
    if isinstance(out, tuple):
        return tuple(_spread(part, shape) for part in out)
    return _spread(out, shape)


def repeats_places(tile: Tensor) -> bool:
    """Whether places of a tensor share their memory, as in an expanded one."""
    return 0 in tile.stride() and any(step == 0 and extent > 1 for step, extent in zip(tile.stride(), tile.shape, strict=True))


def _repeated_dims(tiles: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """Dims, counted from the last as -1, of a result of `shape` along which every operand has one value only."""

    def repeats(tile: Tensor, dim: int) -> bool:
        return -dim > tile.ndim or tile.shape[dim] == 1 or tile.stride(dim) == 0

    dims = [dim for dim in range(-len(shape), 0) if shape[dim] > 1]
    return [dim for dim in dims if all(repeats(tile, dim) for tile in tiles)]


def _narrowed(value: Any, dims: Sequence[int]) -> Any:
    """One value along each of `dims`, still a view; tiled if it was."""
    if not isinstance(value, Tensor):
        return value
    tile = value.local if type(value) is TiledTensor else value
    for dim in dims:
        if -dim <= tile.ndim:
            tile = tile.narrow(dim, 0, 1)
    return wrap_uncut(tile, value.tile_layout.grid) if type(value) is TiledTensor else tile


def _spread(out: TiledTensor, shape: Sequence[int]) -> Any:
    """The result at its full shape, in the memory of one value along the repeated dims."""
    return wrap_uncut(out.local.expand(shape), out.tile_layout.grid)


def writable(target: TiledTensor, tiles: list[Any]) -> list[Any]:
    """The operands of an operation that writes on `target`, of which places share their memory."""
    dims = _repeated_dims([tile for tile in tiles if isinstance(tile, Tensor)], target.shape)
    narrowed = [_narrowed(tile, dims) for tile in tiles]
    if not repeats_places(narrowed[0]):
        return narrowed
    target.local = target.local.contiguous()
    return [target.local, *tiles[1:]]
