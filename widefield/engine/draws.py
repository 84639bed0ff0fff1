"""How a rank draws random numbers for a whole tensor, and sees that all ranks would draw the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from widefield.engine import halo
from widefield.engine.places import space_group
from widefield.engine.tiled import TiledTensor, whole_strides
from widefield.geometry.box import Box, is_empty, size_of, within
from widefield.geometry.interval import Interval

_CHECKED: set[tuple] = set()


def drawn(tensor: TiledTensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of what `draw` makes of an empty whole: a view, so copy it to let the whole go.

    The whole has the tensor's dtype, and its dims lie in memory in the tiles' order, which is the order of the draws.
    """
    layout, tile = tensor.laid, tensor.own
    like = torch.empty_strided(layout.shape, whole_strides(layout, order_of(tensor)), dtype=tile.dtype, device="meta")
    everything = tuple(Interval(0, extent) for extent in layout.shape)
    return draw(torch.empty_like(like, device=tile.device))[within(everything, layout.box)]


# ---------------------------------------------------------------------------------------------- the order in memory


def order_of(tensor: TiledTensor) -> tuple[int, ...]:
    """Strides, of a tile or like a tile's, that tell in which order the whole's dims lie in memory; equal on all ranks.

    Tiles of one pixel on a dim do not tell where it lies, and torch forgets it from there on.  Where there are such tiles, all
    tell what they know, in one small message.  NotImplementedError, on every rank, where they do not know or do not agree.
    """
    layout, tile = tensor.laid, tensor.own
    if not layout.is_cut and tensor.home is not None:  # a view of what is cut: how the tile came to lie differs between ranks
        return tuple(tensor.stride())
    if not layout.is_thin:
        return tuple(tile.stride())
    if type(tile) is not Tensor:  # a compiler looks on: no message can be read
        raise NotImplementedError(
            f"a compiled model cannot draw random numbers for {list(layout.shape)} px in tiles as thin as one pixel; "
            "leave this model uncompiled, or use fewer ranks or a larger image"
        )
    mine = torch.tensor(tile.stride(), dtype=torch.int64, device=tile.device)
    strides = halo.gather_sums(mine, layout.grid.size, space_group(layout.grid)).tolist()
    known = {pair for box, own in zip(layout.boxes, strides, strict=True) for pair in _told_by(box, own)}
    told = [own for own in strides if _pairs(own, layout.shape) <= known]
    orders = told or [tuple(tensor.stride()), *_usual(layout.shape)]  # a view knows its order, if that of its source is known
    fitting = {_pairs(order, layout.shape): tuple(order) for order in orders if _fits(order, known)}
    if len(fitting) != 1:
        agree = not any((inner, outer) in known for outer, inner in known)
        raise NotImplementedError(
            f"the tiles of {list(layout.shape)} px, with strides {strides}, "
            f"{'are too thin to tell' if agree else 'do not agree on'} the order in which one device's memory would hold "
            "the pixels, and random numbers be drawn for them; keep images row-major (torch.contiguous_format), or use fewer "
            "ranks or a larger image"
        )
    return next(iter(fitting.values()))


def _told_by(box: Box, strides: Sequence[int]) -> frozenset[tuple[int, int]]:
    """Pairs (outer, inner) of dims that a tile with these strides knows."""
    return frozenset() if is_empty(box) else _pairs(strides, size_of(box))


def _pairs(strides: Sequence[int], shape: Sequence[int]) -> frozenset[tuple[int, int]]:
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    return frozenset((a, b) for a in dims for b in dims if strides[a] > strides[b])


def _usual(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Row-major and, of images, channels last."""
    dims = len(shape)
    return [tuple(range(dims, 0, -1)), *([(dims + 1, 1, *range(dims, 2, -1))] if dims in (4, 5) else [])]


def _fits(order: Sequence[int], known: Set[tuple[int, int]]) -> bool:
    return all(order[outer] > order[inner] for outer, inner in known)


def check_generators(tensor: TiledTensor, generator: torch.Generator | None) -> None:
    """ValueError, on every rank, where the generators of the ranks of an image stand at different places.

    Asked before every draw, and found out at a process's first on each grid and device, and at the first
    with a generator of its own: one small message.
    """
    grid, device = tensor.laid.grid, tensor.device
    key = (grid, device, generator is not None)
    if grid.size == 1 or key in _CHECKED:
        return
    if type(tensor.own) is not Tensor:
        raise NotImplementedError(
            "a compiled model is about to draw random numbers before the ranks of an image have compared their generators; "
            "draw some from a tiled tensor first, as torch.rand_like(widefield.tile(image, mesh)) does"
        )
    state = generator.get_state() if generator is not None else _state_of(device)
    mark = torch.tensor([zlib.crc32(state.numpy().tobytes())], dtype=torch.int64, device=device)
    marks = halo.gather_sums(mark, grid.size, space_group(grid)).flatten().tolist()
    if len(set(marks)) > 1:
        raise ValueError(
            f"the {grid.size} ranks of an image are about to draw different random numbers: their generators' states on "
            f"{device.type} have the marks {marks}; call torch.manual_seed with the same number on all of them"
        )
    _CHECKED.add(key)


def _state_of(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)
