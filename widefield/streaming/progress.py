"""At which tile the streams of this process are, so that a long step can say it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class _At(NamedTuple):
    direction: str
    segment: int
    segments: int
    tile: int
    tiles: int


_at: _At | None = None


def counted(tiles: Iterable[T], direction: str, segment: S, segments: Sequence[S]) -> Iterator[T]:
    """The tiles of one of a schedule's segments, one after another, as `in_words` tells meanwhile."""
    global _at
    tiles, of = list(tiles), next(number for number, one in enumerate(segments, 1) if one is segment)
    try:
        for number, tile in enumerate(tiles, 1):
            _at = _At(direction, of, len(segments), number, len(tiles))
            yield tile
    finally:
        _at = None


def in_words() -> str | None:
    """Where a stream is, as `backward, segment 2 of 3, tile 5 of 16`; None outside of one.  Any thread may ask."""
    at = _at
    if at is None:
        return None
    part = f"segment {at.segment} of {at.segments}, " if at.segments > 1 else ""
    return f"{at.direction}, {part}tile {at.tile} of {at.tiles}"
