"""Who owns what of a run of things?  Half-open intervals and cuts; the things are pixels of a dim or samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Half-open run of integers: Interval(2, 5) holds 2, 3 and 4; start >= stop holds none.

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
    """Boundaries that cut `length` things into `parts` nearly equal runs, every inner boundary a multiple of `multiple`.

    Counted in blocks of `multiple`, the last of them possibly short, runs differ by at most one block; the longer ones come
    first; with more parts than blocks the last runs are empty.

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


def natural_cut(extent: int, parts: int) -> tuple[int, ...]:
    """Even boundaries, at multiples of up to 32 where that makes no tile over 3 % longer than its share.

    Aligned boundaries stay equal through strides and back up, so that skip connections meet without moving pixels.

    >>> natural_cut(1024, 3), natural_cut(250, 2), natural_cut(7, 2)
    ((0, 352, 704, 1024), (0, 128, 250), (0, 4, 7))
    """
    share = -(-extent // parts)
    for multiple in (32, 16, 8, 4, 2):
        cut = even_cut(extent, parts, multiple=multiple)
        if max(b - a for a, b in zip(cut, cut[1:], strict=False)) <= 1.03 * share:
            return cut
    return even_cut(extent, parts)
