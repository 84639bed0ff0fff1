"""Which pixels go from whom to whom?  Boxes (an Interval per dim) and the routes between tiles; no torch.

A box is a tuple of Intervals, one per tensor dim, in pixels of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widefield.geometry.interval import Interval

Box = tuple[Interval, ...]


def meet(a: Box, b: Box) -> Box:
    """The pixels that both boxes hold."""
    return tuple(x & y for x, y in zip(a, b, strict=True))


def is_empty(box: Box) -> bool:
    """Whether the box holds no pixel."""
    return any(interval.stop <= interval.start for interval in box)


def size_of(box: Box) -> tuple[int, ...]:
    """Pixels on each dim."""
    return tuple(len(interval) for interval in box)


def holds(outer: Box, inner: Box) -> bool:
    """Whether every pixel of `inner` is in `outer`."""
    return is_empty(inner) or all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, inner, strict=True))


def within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """How to index a tensor that holds `outer` to get `inner`."""
    return tuple(slice(i.start - o.start, max(i.start, i.stop) - o.start) for o, i in zip(outer, inner, strict=True))


def rest_of(outer: Box, inner: Box) -> list[Box]:
    """Boxes that together are `outer` without `inner`, which lies in it: two slabs per dim at most.

    >>> rest_of((Interval(0, 4), Interval(0, 4)), (Interval(1, 4), Interval(0, 3)))
    [(Interval(start=0, stop=1), Interval(start=0, stop=4)), (Interval(start=1, stop=4), Interval(start=3, stop=4))]
    """
    if is_empty(inner):
        return [] if is_empty(outer) else [outer]
    slabs, core = [], list(outer)
    for dim, (o, i) in enumerate(zip(outer, inner, strict=True)):
        for side in (Interval(o.start, i.start), Interval(i.stop, o.stop)):
            if len(side):
                slabs.append((*core[:dim], side, *core[dim + 1 :]))
        core[dim] = i
    return slabs


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives: (peer, box) pairs in an order that both ends know, and what it has already."""

    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]
    local: Box
    """The wanted pixels that this rank holds itself."""


def route(rank: int, owned: Sequence[Box], wanted: Sequence[Box], copies: Sequence[Sequence[int]] | None = None) -> Route:
    """Which boxes `rank` exchanges so that every rank gets the box it wants, wherever its pixels live.

    owned[r], wanted[r]: what rank r holds and asks for, the same lists on every rank.  `owned` covers all wanted pixels.
    copies[r]: the ranks that hold distinct pixels as seen by r, for tensors that some ranks hold alike; None: all ranks.

    >>> rows = [(Interval(0, 4),), (Interval(4, 8),)]
    >>> route(0, rows, [(Interval(0, 5),), (Interval(3, 8),)]).receives
    ((1, (Interval(start=4, stop=5),)),)
    """
    everyone = range(len(owned))
    sources = [everyone if copies is None else copies[r] for r in everyone]
    sends, receives = [], []
    for peer in everyone:
        if peer == rank:
            continue
        if rank in sources[peer] and not is_empty(box := meet(owned[rank], wanted[peer])):
            sends.append((peer, box))
        if peer in sources[rank] and not is_empty(box := meet(owned[peer], wanted[rank])):
            receives.append((peer, box))
    return Route(tuple(sends), tuple(receives), meet(owned[rank], wanted[rank]))
