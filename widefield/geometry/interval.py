"""Half-open intervals, and cuts of a length into them; of the pixels of a dim or the samples of a batch.

A cut is the tuple of its boundaries: (0, 35, 64) cuts 64 pixels into 35 and 29.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A half-open run of integers: Interval(2, 5) is 2, 3 and 4; it is empty where start >= stop.

    >>> len(Interval(2, 5)), 4 in Interval(2, 5), list(Interval(2, 5))
    (3, True, [2, 3, 4])
    >>> Interval(2, 5) & Interval(4, 9)
    Interval(start=4, stop=5)
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.start, other.start), min(self.stop, other.stop))


def even_cut(length: int, parts: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Boundaries that cut `length` into `parts` nearly equal runs; inner boundaries are multiples of `multiple`.

    Runs differ by at most one block of `multiple`, and the last block may be short.  Longer runs come first.  With more parts
    than blocks the last runs are empty.  ValueError: a negative length, or fewer than one part or multiple.

    >>> even_cut(64, 3), even_cut(5, 2, multiple=2), even_cut(2, 3)
    ((0, 22, 43, 64), (0, 4, 5), (0, 1, 2, 2))
    """
    if length < 0 or parts < 1 or multiple < 1:
        raise ValueError(f"cannot cut {length} things into {parts} parts at multiples of {multiple}; all must be positive")
    blocks = -(-length // multiple)
    share, longer = divmod(blocks, parts)
    return tuple(min(length, multiple * (share * part + min(part, longer))) for part in range(parts + 1))


def parts_of(cut: Sequence[int]) -> list[Interval]:
    """The intervals between the boundaries of a cut.

    >>> parts_of((0, 4, 5))
    [Interval(start=0, stop=4), Interval(start=4, stop=5)]
    """
    return [Interval(start, stop) for start, stop in zip(cut, cut[1:], strict=False)]


def pieces_of(run: Interval, length: int) -> Iterator[Interval]:
    """An interval in pieces of a length, from its start on; the last one may be shorter.

    >>> list(pieces_of(Interval(2, 7), 3))
    [Interval(start=2, stop=5), Interval(start=5, stop=7)]
    """
    for start in range(run.start, run.stop, length):
        yield Interval(start, min(run.stop, start + length))


def natural_cut(extent: int, parts: int) -> tuple[int, ...]:
    """Nearly even boundaries at multiples of 32, 16, 8, 4 or 2: the first by which no tile is over 3 % above its share.

    Boundaries at multiples of the strides survive downsampling and upsampling exactly, so skip connections need no exchange.

    >>> natural_cut(1024, 3), natural_cut(250, 2), natural_cut(7, 2)
    ((0, 352, 704, 1024), (0, 128, 250), (0, 4, 7))
    """
    share = -(-extent // parts)
    for multiple in (32, 16, 8, 4, 2):
        cut = even_cut(extent, parts, multiple=multiple)
        if max(b - a for a, b in zip(cut, cut[1:], strict=False)) <= 1.03 * share:
            return cut
    return even_cut(extent, parts)
