"""Operations on tensors that are the same on every rank: each rank runs the plain operation.

A gradient that repeats one value over an image, as a mean's does, is computed once and not per pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.layout import Grid, uncut
from widefield.private_torch.autograd import current_graph_task_id
from widefield.private_torch.dispatcher import schema_of
from widefield.private_torch.pytree import tree_map
from widefield.rules import PLAIN_OUTPUTS
from widefield.tiled.schemas import NUMBERS, targets_of, written_by
from widefield.tiled.tensor import TiledTensor, swap, wrap_uncut, wrap_view
from widefield.tiled.view_writeback import version_of


def on_every_rank(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `func` on tensors that are the same on every rank, and so is its result."""
    grid: Grid | None = None
    given, has_writeback = (args, kwargs), False
    targets: dict[int, TiledTensor] = {}

    def plain(value: Any) -> Any:
        nonlocal grid, has_writeback
        if type(value) is not TiledTensor:
            return value
        if value.writeback is not None:
            has_writeback = True
            value.writeback.refresh(version_of(value))
        grid = value.tile_layout.grid
        targets[id(value.local)] = value
        return value.local

    plain_args, plain_kwargs = mapped(plain, args, kwargs)
    out = func(*plain_args, **plain_kwargs)
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
    if has_writeback:
        made = _write_back(func, *given, made)
    if func.is_view:
        given[0][0].has_views = True
    return made


def _written(target: TiledTensor) -> TiledTensor:
    """The tensor that was written to; an operation on its tile may have changed its shape."""
    if target.local.shape == target.shape:
        return target
    return swap(target, wrap_view(target.local, uncut(tuple(target.local.shape), target.tile_layout.grid)))


def _write_back(func: Any, args: tuple, kwargs: dict, made: Any) -> Any:
    """Write back the targets that are views and copies; a view of such a view gets the same write-back."""
    for target in targets_of(func, args, kwargs):
        if type(target) is TiledTensor and target.writeback is not None:
            target.writeback.flush(version_of(target) + 1)
    first = args[0]
    if not func.is_view or written_by(func) or type(first) is not TiledTensor or first.writeback is None:
        return made
    return tree_map(partial(_view_of, first), made)


def _view_of(source: TiledTensor, view: Tensor) -> TiledTensor:
    """A view of a view that is a copy.  It is tiled even if it is a single number, for writes to it are written back."""
    view = view if type(view) is TiledTensor else wrap_view(view, uncut((), source.tile_layout.grid))
    view.writeback, view.may_alias_data = source.writeback, source.may_alias_data
    return view


def is_in_place(func: Any) -> bool:
    """Whether an operation writes into its first argument."""
    arguments = schema_of(func).arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors among the values, also in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            if value and type(value[0]) not in NUMBERS:
                found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def mapped(run: Callable[[Any], Any], args: Sequence[Any], kwargs: dict) -> tuple[list, dict]:
    """The arguments of an operation with run(value) for each value, in lists too.  A tenth of the time of `tree_map`."""

    def of(value: Any) -> Any:
        if type(value) is not list:
            return run(value)
        return [run(element) for element in value] if value and type(value[0]) not in NUMBERS else value

    return [of(arg) for arg in args], {name: of(value) for name, value in kwargs.items()} if kwargs else kwargs


# ---------------------------------------------------------------------------------------------- expanded gradients


def on_uncut(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a pointwise operation on uncut operands; in a backward only once along dims that all operands repeat.

    Torch expands the gradient of a mean and then divides it, which would fill an image on every rank.
    """
    if current_graph_task_id() == -1:  # in a forward, the model may write to the result
        return on_every_rank(func, args, kwargs)
    if kwargs.get("memory_format") is torch.contiguous_format:  # asked for a view that an expanded tensor does not allow
        return on_every_rank(func, args, kwargs)
    tiles = [t.local if type(t) is TiledTensor else t for t in tensors_in(args, kwargs)]
    if all(0 not in tile.stride() and tile.shape == tiles[0].shape for tile in tiles):
        return on_every_rank(func, args, kwargs)
    shape = broadcast_shape(*[tile.shape for tile in tiles])
    dims = _repeated_dims(tiles, shape)
    if not dims:
        return on_every_rank(func, args, kwargs)
    narrow = partial(_narrowed, dims=dims)
    out = on_every_rank(func, tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()})
    if isinstance(out, tuple):
        return tuple(_spread(part, shape) for part in out)
    return _spread(out, shape)


@lru_cache(4096)
def broadcast_shape(*shapes: torch.Size) -> tuple[int, ...]:
    """The shape of a pointwise result.  Torch computes it in Python, which takes longer than many an operation."""
    return tuple(torch.broadcast_shapes(*shapes))


def has_internal_overlap(tile: Tensor) -> bool:
    """Whether several elements of a tensor share memory, as in an expanded tensor."""
    return 0 in tile.stride() and any(step == 0 and extent > 1 for step, extent in zip(tile.stride(), tile.shape, strict=True))


def _repeated_dims(tiles: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """The dims, as negative numbers, of a result of `shape` along which every operand repeats one value."""

    def repeats(tile: Tensor, dim: int) -> bool:
        return -dim > tile.ndim or tile.shape[dim] == 1 or tile.stride(dim) == 0

    dims = [dim for dim in range(-len(shape), 0) if shape[dim] > 1]
    return [dim for dim in dims if all(repeats(tile, dim) for tile in tiles)]


def _narrowed(value: Any, dims: Sequence[int]) -> Any:
    """The view of the first element along each of `dims`; tiled if the value is."""
    if not isinstance(value, Tensor):
        return value
    tile = value.local if type(value) is TiledTensor else value
    for dim in dims:
        if -dim <= tile.ndim:
            tile = tile.narrow(dim, 0, 1)
    return wrap_uncut(tile, value.tile_layout.grid) if type(value) is TiledTensor else tile


def _spread(out: TiledTensor, shape: Sequence[int]) -> Any:
    """The result, expanded to its full shape."""
    return wrap_uncut(out.local.expand(shape), out.tile_layout.grid)


def writable(target: TiledTensor, tiles: list[Any]) -> list[Any]:
    """The operands of an in-place operation on `target`, which has internal overlap.

    They are narrowed to one element along repeated dims; where that is not enough, `target` gets memory of its own.
    """
    dims = _repeated_dims([tile for tile in tiles if isinstance(tile, Tensor)], target.shape)
    narrowed = [_narrowed(tile, dims) for tile in tiles]
    if not has_internal_overlap(narrowed[0]):
        return narrowed
    target.local = target.local.contiguous()
    return [target.local, *tiles[1:]]
