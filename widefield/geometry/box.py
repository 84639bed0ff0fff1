"""Boxes, and which pixels each rank sends to which rank.  No torch.

A box is a tuple of Intervals, one per tensor dim, in pixels of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widefield.geometry.interval import Interval

Box = tuple[Interval, ...]


def full_box(shape: Sequence[int]) -> Box:
    """The box of all pixels of a tensor of `shape`."""
    return tuple(Interval(0, extent) for extent in shape)


def meet(a: Box, b: Box) -> Box:
    """The intersection of two boxes."""
    return tuple(x & y for x, y in zip(a, b, strict=True))


def is_empty(box: Box) -> bool:
    """Whether the box has no pixel."""
    return any(interval.stop <= interval.start for interval in box)


def size_of(box: Box) -> tuple[int, ...]:
    """The number of pixels on each dim, as a tensor's shape."""
    return tuple(len(interval) for interval in box)


def holds(outer: Box, inner: Box) -> bool:
    """Whether every pixel of `inner` is in `outer`."""
    return is_empty(inner) or all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, inner, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that takes a box from the last dims of a whole, behind `...`.

    >>> slices((Interval(1, 3), Interval(0, 2)))
    (slice(1, 3, None), slice(0, 2, None))
    """
    return tuple(slice(run.start, run.stop) for run in box)


def within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """The index that takes the box `inner` from a tensor whose pixels are the box `outer`."""
    return tuple(slice(i.start - o.start, max(i.start, i.stop) - o.start) for o, i in zip(outer, inner, strict=True))


def enlarged(box: Box, by: int) -> Box:
    """The box in an image of `by` times as many pixels along each dim.

    >>> enlarged((Interval(1, 3), Interval(0, 2)), 2)
    (Interval(start=2, stop=6), Interval(start=0, stop=4))
    """
    return tuple(Interval(run.start * by, run.stop * by) for run in box)


def covering(box: Box, by: int) -> Box:
    """The smallest box that holds `box` once it is enlarged `by` times.

    >>> covering((Interval(1, 3), Interval(0, 2)), 2)
    (Interval(start=0, stop=2), Interval(start=0, stop=1))
    """
    return tuple(Interval(run.start // by, -(-run.stop // by)) for run in box)


def hull(a: Box, b: Box) -> Box:
    """The smallest box that holds both."""
    return tuple(Interval(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


def rest_of(outer: Box, inner: Box) -> list[Box]:
    """Disjoint boxes that together are `outer` without `inner`, at most two per dim.  `inner` must lie within `outer`.

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
    """What one rank sends and receives: (peer, box) pairs, ascending by peer; and what it takes from its own tile."""

    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]
    local: Box
    """The wanted pixels that are in this rank's own tile."""


def route(rank: int, owned: Sequence[Box], wanted: Sequence[Box], copies: Sequence[Sequence[int]] | None = None) -> Route:
    """The boxes that `rank` sends and receives so that every rank gets the box it wants.

    owned[r], wanted[r]: the boxes that rank r has and wants, the same lists on every rank.  `owned` covers all that is wanted.
    copies[r]: the ranks from which rank r reads, one per distinct tile, where tiles are replicated; None: all ranks.

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
