"""Random numbers of a whole tensor, which every rank draws, and the check that all ranks draw the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm import collectives, halo
from widefield.geometry.box import Box, full_box, is_empty, size_of, within
from widefield.private_torch.dispatcher import EffectType, register_effectful_op
from widefield.private_torch.fake_tensors import is_eager, runs_on_gpu
from widefield.private_torch.process_groups import resolve_process_group
from widefield.tiled.gather_watch import note_drawn
from widefield.tiled.redistribute import space_group
from widefield.tiled.tensor import TiledTensor, usual_orders, whole_strides


def drawn(tensor: TiledTensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's tile of draw(an empty tensor of the whole's shape); a view, to be copied so that the whole can be freed.

    The empty tensor has the tensor's dtype, and its dims the order in memory that they have on a single device, since numbers
    are drawn in that order.
    """
    note_drawn(tensor)
    layout, tile = tensor.tile_layout, tensor.local
    like = torch.empty_strided(layout.shape, whole_strides(layout, order_of(tensor)), dtype=tile.dtype, device="meta")
    return draw(torch.empty_like(like, device=tile.device))[within(full_box(layout.shape), layout.box)]


def with_gaps(like: Tensor) -> Tensor:
    """An empty tensor of the same shape with gaps in memory, for which a GPU's dropout draws in another order than without."""
    return like.new_empty((*like.shape, 2))[..., 0] if runs_on_gpu(like) else like


# ---------------------------------------------------------------------------------------------- the order in memory


def order_of(tensor: TiledTensor) -> tuple[int, ...]:
    """Strides, up to scale, that order the whole's dims in memory; the same on all ranks.

    The strides of a tile with one pixel on a dim do not show where that dim lies.  If there are such tiles, all ranks exchange
    their strides, in one small message.  NotImplementedError, on every rank: the order remains unknown, or tiles contradict
    each other.
    """
    layout, tile = tensor.tile_layout, tensor.local
    if not layout.is_cut and tensor.writeback is not None:  # a gathered view: ranks' copies may differ in strides
        return tuple(tensor.stride())
    if not layout.is_thin:
        return tuple(tile.stride())
    if type(tile) is not Tensor:  # under a compiler no message can be read
        raise NotImplementedError(
            f"a compiled model cannot draw random numbers for {list(layout.shape)} px in tiles as thin as one pixel; "
            "leave this model uncompiled, or use fewer ranks or a larger image"
        )
    mine = torch.tensor(tile.stride(), dtype=torch.int64, device=tile.device)
    strides = halo.gather_sums(mine, layout.grid.size, space_group(layout.grid)).tolist()
    known = {pair for box, own in zip(layout.boxes, strides, strict=True) for pair in _order_known_by(box, own)}
    complete = [own for own in strides if _pairs(own, layout.shape) <= known and _orders_all(own, layout.shape)]
    recorded = tuple(tensor.stride())  # as memory_format.py recorded it
    if not complete and _orders_all(recorded, layout.shape) and _fits(recorded, known):
        return recorded
    orders = complete or [recorded, *usual_orders(len(layout.shape))]
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


def _order_known_by(box: Box, strides: Sequence[int]) -> frozenset[tuple[int, int]]:
    """The pairs (outer, inner) of dims whose order the strides of a tile show."""
    return frozenset() if is_empty(box) else _pairs(strides, size_of(box))


def _pairs(strides: Sequence[int], shape: Sequence[int]) -> frozenset[tuple[int, int]]:
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    return frozenset((a, b) for a in dims for b in dims if strides[a] > strides[b])


def _orders_all(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether no two dims of more than one pixel have the same stride."""
    long = [stride for stride, extent in zip(strides, shape, strict=True) if extent > 1]
    return len(set(long)) == len(long)


def _fits(order: Sequence[int], known: Set[tuple[int, int]]) -> bool:
    return all(order[outer] > order[inner] for outer, inner in known)


# ---------------------------------------------------------------------------------------------- comparing generators


def check_generators(tensor: TiledTensor, generator: torch.Generator | None) -> None:
    """Called before every draw on tiles: see `compare_generators`."""
    grid, tile = tensor.tile_layout.grid, tensor.local
    if grid.size == 1:
        return
    if is_eager(tile):
        group = resolve_process_group(space_group(grid))
        compare_generators(group, tensor.device, generator, drawn=tensor.tile_layout.shape)
    elif generator is None:
        torch.ops.widefield.compare_generators(tile.new_empty(0), space_group(grid), list(tensor.tile_layout.shape))
    else:
        raise NotImplementedError(
            "a compiled model cannot see whether a torch.Generator of its own stands at the same place on all ranks of an "
            "image; draw from torch's own generator, or leave this model uncompiled"
        )


@dataclass(frozen=True)
class _Comparison:
    """A comparison of generators under way.  mark: a hash of this rank's state; marks: those of all ranks, once received."""

    mark: Tensor
    marks: Tensor
    work: dist.Work | None
    whose: str

    def check(self) -> None:
        """Wait for the marks.  ValueError: they differ."""
        if self.work is not None:
            self.work.wait()
        marks = self.marks.tolist()
        if len(set(marks)) > 1:
            raise ValueError(
                f"{len(marks)} ranks that share their images or layers draw different random numbers: where they drew last, "
                f"{self.whose} stood at {[f'{mark & 0xFFFFFFFF:08x}' for mark in marks]}; call torch.manual_seed with the same "
                "number on all of them, and let no rank draw, outside of the model or in it, what the others do not"
            )


_PENDING: WeakKeyDictionary[dist.ProcessGroup, _Comparison] = WeakKeyDictionary()
"""The comparison of each group that was not yet checked."""
_CHECKED: WeakKeyDictionary[dist.ProcessGroup, set[tuple]] = WeakKeyDictionary()
"""The kinds of generators that were checked once, by group: their later comparisons are checked a draw later."""


def compare_generators(
    group: dist.ProcessGroup, device: torch.device, generator: torch.Generator | None = None, *, drawn: Sequence[int] = ()
) -> None:
    """Compare the states of a group's generators; every rank of the group calls it before each draw.

    generator: None for torch's own of the device.  drawn: the shape of what will be drawn.
    ValueError, on every rank at the same draw: the states differ.  It is raised at the next draw of any generator, so that no
    rank waits, or at this one, if it is the first of its kind.
    Cost: an all-gather of 8 bytes per rank, which overlaps with computation.
    """
    before = _PENDING.pop(group, None)
    if before is not None:
        before.check()
    mark = torch.tensor([_mark(device, generator, drawn)], dtype=torch.int64, device=_device_of(group, device))
    marks = mark.new_empty(group.size())
    halo.TRAFFIC.draw_messages += 1
    work = collectives.all_gather_single(marks, mark, group=group, async_op=True)
    whose = f"torch's generators on {device.type}" if generator is None else f"their torch.Generator on {generator.device}"
    comparison, kind = _Comparison(mark, marks, work, whose), (device, generator is None)
    if kind in _CHECKED.setdefault(group, set()):
        _PENDING[group] = comparison
    else:
        _CHECKED[group].add(kind)
        comparison.check()


def forget() -> None:
    """Drop all comparisons, as if there had been none."""
    _PENDING.clear()
    _CHECKED.clear()


def _mark(device: torch.device, generator: torch.Generator | None, drawn: Sequence[int]) -> int:
    state = generator.get_state() if generator is not None else _state_of(device)
    digest = hashlib.blake2b(state.numpy().data, digest_size=8, key=repr(tuple(drawn)).encode()[:64]).digest()
    return int.from_bytes(digest, "little", signed=True)


def _state_of(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _device_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device of a message: the CPU if the group has a CPU backend, so that no rank waits for its GPU."""
    return torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else device


@torch.library.custom_op("widefield::compare_generators", mutates_args=())
def _compare_operator(like: Tensor, group_name: str, drawn: list[int]) -> None:
    compare_generators(resolve_process_group(group_name), like.device, drawn=drawn)


@_compare_operator.register_fake
def _(like: Tensor, group_name: str, drawn: list[int]) -> None:
    return None


register_effectful_op("widefield::compare_generators", EffectType.ORDERED)
