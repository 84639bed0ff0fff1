"""Halo exchange: sends pixels between tiles, and sums between the ranks that share an image.

Pixels go point to point: one packed message from each rank to each peer that wants some of its pixels, corners included.
Other ranks take no part.  Sums go through a collective over the ranks along the axes that cut the summed dims.  Everything
here runs below autograd: the rules say what the backward operation reads, so an exchange needs no gradient formula.

Under `torch.compile` the same messages are custom operators (`widefield::exchange`, `widefield::gather_sums`,
`widefield::add_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm import collectives, point_to_point
from widefield.geometry.box import Box, Route, holds, is_empty, route, size_of, within
from widefield.geometry.strides import stride_order
from widefield.private_torch.dispatcher import EffectType, register_effectful_op
from widefield.private_torch.fake_tensors import is_eager
from widefield.private_torch.process_groups import resolve_process_group

Piece = tuple[Box, Tensor]
"""Pixels and the box of the whole that they fill."""


@dataclass
class Traffic:
    """What this rank has sent since `clear`: messages and bytes of pixels, and of sums (bytes of its own input to each).

    draw_messages: 8-byte messages in which ranks compare the states of their random number generators.
    """

    pixel_messages: int = 0
    pixel_bytes: int = 0
    sum_messages: int = 0
    sum_bytes: int = 0
    draw_messages: int = 0
    largest_share: float = 0.0
    """Largest fraction of a wanted box that this rank received from others in one exchange; near 1 is an all-gather."""

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


TRAFFIC = Traffic()
LISTENERS: list[Callable[[str, Sequence[int] | None], None]] = []
"""Functions called at each exchange with the group's name and the peers' ranks in the group; None for a collective."""


@dataclass(frozen=True)
class Move:
    """This rank's side of one tensor's exchange: it owns `owned` and wants `wanted`; `route` says what is sent and received."""

    owned: Box
    wanted: Box
    route: Route

    @property
    def is_idle(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self.route.sends and not self.route.receives

    @cached_property
    def sends(self) -> list[tuple[int, tuple[slice, ...]]]:
        """Each peer that gets pixels, and the index that takes them from this rank's tile."""
        return [(peer, within(self.owned, box)) for peer, box in self.route.sends]

    @cached_property
    def receives(self) -> list[tuple[int, int]]:
        """Each peer that pixels come from, and how many."""
        return [(peer, _pixels(box)) for peer, box in self.route.receives]

    @cached_property
    def share_received(self) -> float:
        """The fraction of the wanted box that comes from other ranks."""
        whole = _pixels(self.wanted)
        return sum(pixels for _, pixels in self.receives) / whole if whole else 0.0


def move_of(index: int, owned: Sequence[Box], wanted: Sequence[Box], sources: Sequence[Sequence[int]] | None = None) -> Move:
    """The exchange, as rank `index` of the grid sees it, in which rank r owns `owned[r]` and gets `wanted[r]`; see `route`."""
    found = Move(owned[index], wanted[index], route(index, owned, wanted, sources))
    got = sum(_pixels(box) for box in (found.route.local, *(box for _, box in found.route.receives)))
    assert got == _pixels(wanted[index]), f"{got} px come for {wanted[index]} out of {owned}"
    return found


def _pixels(box: Box) -> int:
    return torch.Size(size_of(box)).numel()


@dataclass
class Pending:
    """Messages under way; `wait` gives the received pieces, a list per move."""

    shapes: list[list[tuple[int, Box]]]
    buffers: dict[int, Tensor]
    works: list[dist.Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    like: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[list[Piece]]:
        """Each move's received pieces, as views of one buffer per peer."""
        for work in self.works:
            work.wait()
        self.sent.clear()
        offset = dict.fromkeys(self.buffers, 0)
        pieces: list[list[Piece]] = []
        for receives, like in zip(self.shapes, self.like, strict=True):
            pieces.append([(box, _next_piece(self.buffers[peer], offset, peer, box, like)) for peer, box in receives])
        return pieces


def _next_piece(buffer: Tensor, offset: dict[int, int], peer: int, box: Box, like: Tensor) -> Tensor:
    """The next piece of a peer's buffer, which holds bytes where several moves were packed, else elements of one tensor."""
    size = size_of(box)
    count = torch.Size(size).numel()
    if buffer.dtype is torch.uint8 and like.dtype is not torch.uint8:
        count *= like.element_size()
    start = offset[peer]
    offset[peer] = start + count
    return buffer[start : start + count].view(like.dtype).view(size)


def start(moves: Sequence[Move], tiles: Sequence[Tensor], group_name: str) -> Pending:
    """Start the exchange of one tile per move; every rank of the group calls it with its own side of the same moves."""
    sends: dict[int, list[Tensor]] = {}
    sizes: dict[int, int] = {}
    packed = len(moves) > 1
    for move, tile in zip(moves, tiles, strict=True):
        for peer, index in move.sends:
            piece = tile.detach()[index].reshape(-1)
            sends.setdefault(peer, []).append(_as_bytes(piece) if packed else piece)
        for peer, pixels in move.receives:
            sizes[peer] = sizes.get(peer, 0) + pixels * (tile.element_size() if packed else 1)
    messages = {peer: pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces) for peer, pieces in sends.items()}
    shapes = [list(move.route.receives) for move in moves]
    dtype = torch.uint8 if packed else tiles[0].dtype
    _count(moves, messages)
    if _is_traced(tiles[0]):
        got = torch.ops.widefield.exchange(
            list(messages.values()),
            list(messages),
            list(sizes),
            list(sizes.values()),
            tiles[0].new_empty(0, dtype=dtype),
            group_name,
        )
        return Pending(shapes, dict(zip(sizes, got, strict=True)), like=list(tiles))
    buffers = {peer: torch.empty(size, dtype=dtype, device=tiles[0].device) for peer, size in sizes.items()}
    return Pending(shapes, buffers, _send(messages, buffers, group_name), list(messages.values()), list(tiles))


def _as_bytes(piece: Tensor) -> Tensor:
    """A flat tensor's bytes.  (A tensor of one element counts as contiguous with any stride, but `view` wants stride 1.)"""
    whole = piece if piece.stride(0) == 1 else piece.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.uint8)


def _count(moves: Sequence[Move], messages: dict[int, Tensor]) -> None:
    TRAFFIC.pixel_messages += len(messages)
    TRAFFIC.pixel_bytes += sum(message.numel() * message.element_size() for message in messages.values())
    for move in moves:
        TRAFFIC.largest_share = max(TRAFFIC.largest_share, move.share_received)


def _send(messages: dict[int, Tensor], buffers: dict[int, Tensor], group_name: str) -> list[dist.Work]:
    """Post the sends of `messages` and the receives into `buffers`, both by the peer's rank in the group."""
    if not messages and not buffers:
        return []
    for listener in LISTENERS:
        listener(group_name, [*messages, *buffers])
    return point_to_point.exchange(messages, buffers, resolve_process_group(group_name))


def assemble(move: Move, tile: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The wanted box as one tensor: a view of the tile where that contains the box, else a copy of tile and pieces."""
    if not pieces and holds(move.owned, move.wanted) and not is_empty(move.wanted):
        return tile if move.wanted == move.owned else tile[within(move.owned, move.wanted)]
    whole = _empty(tile, size_of(move.wanted))
    if not is_empty(move.route.local):
        whole[within(move.wanted, move.route.local)] = tile[within(move.owned, move.route.local)]
    for box, piece in pieces:
        whole[within(move.wanted, box)] = piece
    return whole


def _empty(tile: Tensor, size: tuple[int, ...]) -> Tensor:
    """A new tensor with the tile's memory format."""
    if tile.is_contiguous():
        return tile.new_empty(size)
    return torch.empty_permuted(size, stride_order(tile.stride()), dtype=tile.dtype, device=tile.device)


def gather(moves: Sequence[Move], tiles: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """Every move's wanted box; waits for the pieces."""
    if all(move.is_idle for move in moves):
        return [assemble(move, tile, ()) for move, tile in zip(moves, tiles, strict=True)]
    pieces = start(moves, tiles, group_name).wait()
    return [assemble(move, tile, got) for move, tile, got in zip(moves, tiles, pieces, strict=True)]


def gather_sums(part: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """Every rank's `part`, stacked in the group's order: (num_ranks, *part.shape)."""
    TRAFFIC.sum_messages += 1
    TRAFFIC.sum_bytes += part.numel() * part.element_size()
    operator = torch.ops.widefield.gather_sums if _is_traced(part) else _gather
    return operator(part.contiguous(), num_ranks, group_name)


def add_sums(part: Tensor, group_name: str) -> Tensor:
    """The sum of `part` over the group, as a new tensor."""
    TRAFFIC.sum_messages += 1
    TRAFFIC.sum_bytes += part.numel() * part.element_size()
    operator = torch.ops.widefield.add_sums if _is_traced(part) else _add
    return operator(part, group_name)


def _is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile traces: then messages must be custom operators."""
    return not is_eager(tensor)


def _gather(part: Tensor, num_ranks: int, group_name: str) -> Tensor:
    for listener in LISTENERS:
        listener(group_name, None)
    parts = part.new_empty(num_ranks * part.numel())
    collectives.all_gather_single(parts, part.reshape(-1), group=resolve_process_group(group_name))
    return parts.view(num_ranks, *part.shape)


def _add(part: Tensor, group_name: str) -> Tensor:
    for listener in LISTENERS:
        listener(group_name, None)
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=resolve_process_group(group_name))
    return total


# ---------------------------------------------------------------------------------------------- operators for compilers


@torch.library.custom_op("widefield::exchange", mutates_args=())
def _exchange(
    messages: list[Tensor], to: list[int], source: list[int], sizes: list[int], like: Tensor, group_name: str
) -> list[Tensor]:
    buffers = {peer: like.new_empty(size) for peer, size in zip(source, sizes, strict=True)}
    for work in _send(dict(zip(to, messages, strict=True)), buffers, group_name):
        work.wait()
    return list(buffers.values())


@_exchange.register_fake
def _(
    messages: list[Tensor], to: list[int], source: list[int], sizes: list[int], like: Tensor, group_name: str
) -> list[Tensor]:
    return [like.new_empty(size) for size in sizes]


@torch.library.custom_op("widefield::gather_sums", mutates_args=())
def _gather_operator(part: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return _gather(part, num_ranks, group_name)


@_gather_operator.register_fake
def _(part: Tensor, num_ranks: int, group_name: str) -> Tensor:
    return part.new_empty((num_ranks, *part.shape))


@torch.library.custom_op("widefield::add_sums", mutates_args=())
def _add_operator(part: Tensor, group_name: str) -> Tensor:
    return _add(part, group_name)


@_add_operator.register_fake
def _(part: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


for _operator in ("exchange", "gather_sums", "add_sums"):
    # Each rank compiles its own graph, so the compiler must not drop a message that only the peer uses, or reorder messages.
    register_effectful_op(f"widefield::{_operator}", EffectType.ORDERED)
