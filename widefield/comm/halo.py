"""Moves pixels between tiles: the only file that sends activations and their sums.

Pixels go point to point, one packed message from each rank to each peer that wants some of its pixels, corners included;
nobody else takes part.  Sums go through a collective over the ranks that cut what is summed.  Everything here runs below
autograd: rules say what the backward operation reads, so no exchange needs a gradient of its own.

Under `torch.compile` the same messages are operators of their own (`widefield::exchange`, `widefield::gather_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm import collectives, point_to_point
from widefield.geometry.box import Box, Route, holds, is_empty, route, size_of, within
from widefield.geometry.strides import stride_order
from widefield.private_torch.dispatcher import EffectType, register_effectful_op
from widefield.private_torch.process_groups import resolve_process_group

Piece = tuple[Box, Tensor]


@dataclass
class Traffic:
    """What this rank has sent since `clear`: messages and bytes of pixels to peers, and of sums (bytes put in).

    draw_messages: those of 8 bytes in which ranks compare their generators.
    """

    pixel_messages: int = 0
    pixel_bytes: int = 0
    sum_messages: int = 0
    sum_bytes: int = 0
    draw_messages: int = 0
    largest_share: float = 0.0
    """Largest part of a tensor's pixels that this rank got from others in one exchange; near 1 is an all-gather."""

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


TRAFFIC = Traffic()
LISTENERS: list[Callable[[str, Sequence[int] | None], None]] = []
"""Who is told of each message: its group and, of one between two ranks, to whom by their places in it, None for all."""


@dataclass(frozen=True)
class Move:
    """One tensor's exchange as this rank sees it: it holds `owned`, wants `wanted`, and `route` says who sends what."""

    owned: Box
    wanted: Box
    route: Route

    @property
    def is_idle(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self.route.sends and not self.route.receives


def move_of(index: int, owned: Sequence[Box], wanted: Sequence[Box], sources: Sequence[Sequence[int]] | None = None) -> Move:
    """The exchange in which rank r of the grid holds `owned[r]` and gets `wanted[r]`; see `route`."""
    found = Move(owned[index], wanted[index], route(index, owned, wanted, sources))
    got = sum(_pixels(box) for box in (found.route.local, *(box for _, box in found.route.receives)))
    assert got == _pixels(wanted[index]), f"{got} px come for {wanted[index]} out of {owned}"
    return found


def _pixels(box: Box) -> int:
    return torch.Size(size_of(box)).numel()


@dataclass
class Pending:
    """Messages on their way; `wait` gives the pieces that came, a list per move."""

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
            pieces.append([(box, _cut_off(self.buffers[peer], offset, peer, box, like)) for peer, box in receives])
        return pieces


def _cut_off(buffer: Tensor, offset: dict[int, int], peer: int, box: Box, like: Tensor) -> Tensor:
    """The next piece of a peer's buffer: bytes where moves were packed, else elements of the one tensor."""
    size = size_of(box)
    count = torch.Size(size).numel()
    if buffer.dtype is torch.uint8 and like.dtype is not torch.uint8:
        count *= like.element_size()
    start = offset[peer]
    offset[peer] = start + count
    return buffer[start : start + count].view(like.dtype).view(size)


def start(moves: Sequence[Move], tiles: Sequence[Tensor], group_name: str) -> Pending:
    """Begin to exchange the tiles; every rank of the group calls it with its own view of the same moves."""
    sends: dict[int, list[Tensor]] = {}
    sizes: dict[int, int] = {}
    packed = len(moves) > 1
    for move, tile in zip(moves, tiles, strict=True):
        for peer, box in move.route.sends:
            piece = tile.detach()[within(move.owned, box)].reshape(-1)
            sends.setdefault(peer, []).append(_as_bytes(piece) if packed else piece)
        for peer, box in move.route.receives:
            count = torch.Size(size_of(box)).numel() * (tile.element_size() if packed else 1)
            sizes[peer] = sizes.get(peer, 0) + count
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
    """A flat tensor's bytes.  (One element may say any stride, and torch takes it for contiguous.)"""
    whole = piece if piece.stride(0) == 1 else piece.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.uint8)


def _count(moves: Sequence[Move], messages: dict[int, Tensor]) -> None:
    TRAFFIC.pixel_messages += len(messages)
    TRAFFIC.pixel_bytes += sum(message.numel() * message.element_size() for message in messages.values())
    for move in moves:
        whole = torch.Size(size_of(move.wanted)).numel()
        got = sum(torch.Size(size_of(box)).numel() for _, box in move.route.receives)
        TRAFFIC.largest_share = max(TRAFFIC.largest_share, got / whole if whole else 0.0)


def _send(messages: dict[int, Tensor], buffers: dict[int, Tensor], group_name: str) -> list[dist.Work]:
    """Post every message and buffer; peers are ranks of the group."""
    if not messages and not buffers:
        return []
    for hear in LISTENERS:
        hear(group_name, [*messages, *buffers])
    return point_to_point.exchange(messages, buffers, resolve_process_group(group_name))


def assemble(move: Move, tile: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The wanted box as one tensor: the tile itself, or a part of it, where that is all; else a copy from the pieces."""
    if not pieces and holds(move.owned, move.wanted) and not is_empty(move.wanted):
        return tile if move.wanted == move.owned else tile[within(move.owned, move.wanted)]
    whole = _empty(tile, size_of(move.wanted))
    if not is_empty(move.route.local):
        whole[within(move.wanted, move.route.local)] = tile[within(move.owned, move.route.local)]
    for box, piece in pieces:
        whole[within(move.wanted, box)] = piece
    return whole


def _empty(tile: Tensor, size: tuple[int, ...]) -> Tensor:
    """A new tensor whose dims lie in memory in the tile's order."""
    if tile.is_contiguous():
        return tile.new_empty(size)
    return torch.empty_permuted(size, stride_order(tile.stride()), dtype=tile.dtype, device=tile.device)


def gather(moves: Sequence[Move], tiles: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """Every move's wanted box, once its pieces have come."""
    if all(move.is_idle for move in moves):
        return [assemble(move, tile, ()) for move, tile in zip(moves, tiles, strict=True)]
    pieces = start(moves, tiles, group_name).wait()
    return [assemble(move, tile, got) for move, tile, got in zip(moves, tiles, pieces, strict=True)]


def gather_sums(part: Tensor, ways: int, group_name: str) -> Tensor:
    """(ways, ...) every rank's `part`, in the group's order."""
    TRAFFIC.sum_messages += 1
    TRAFFIC.sum_bytes += part.numel() * part.element_size()
    operator = torch.ops.widefield.gather_sums if _is_traced(part) else _gather
    return operator(part.contiguous(), ways, group_name)


def add_sums(part: Tensor, group_name: str) -> Tensor:
    """`part` added up over the group, new."""
    TRAFFIC.sum_messages += 1
    TRAFFIC.sum_bytes += part.numel() * part.element_size()
    operator = torch.ops.widefield.add_sums if _is_traced(part) else _add
    return operator(part, group_name)


def _is_traced(tensor: Tensor) -> bool:
    """Whether a compiler is looking on: then messages must be operators that it knows."""
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def _gather(part: Tensor, ways: int, group_name: str) -> Tensor:
    for hear in LISTENERS:
        hear(group_name, None)
    parts = part.new_empty(ways * part.numel())
    collectives.all_gather_single(parts, part.reshape(-1), group=resolve_process_group(group_name))
    return parts.view(ways, *part.shape)


def _add(part: Tensor, group_name: str) -> Tensor:
    for hear in LISTENERS:
        hear(group_name, None)
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=resolve_process_group(group_name))
    return whole


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
def _gather_operator(part: Tensor, ways: int, group_name: str) -> Tensor:
    return _gather(part, ways, group_name)


@_gather_operator.register_fake
def _(part: Tensor, ways: int, group_name: str) -> Tensor:
    return part.new_empty((ways, *part.shape))


@torch.library.custom_op("widefield::add_sums", mutates_args=())
def _add_operator(part: Tensor, group_name: str) -> Tensor:
    return _add(part, group_name)


@_add_operator.register_fake
def _(part: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


for _operator in ("exchange", "gather_sums", "add_sums"):
    # Each rank compiles a graph of its own: none may drop a message that only its peer uses, nor change their order.
    register_effectful_op(f"widefield::{_operator}", EffectType.ORDERED)
