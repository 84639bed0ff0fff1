"""Which windows of one size cover an image, each pixel exactly once?

Along each dim windows lie side by side, the first beginning at `-shift`, so the outer ones may reach beyond the image.  Their
number does not depend on the shift, so that every epoch has equally many; how many shifts there are follows from that.
"""

from __future__ import annotations

from widefield.geometry.interval import Interval


def num_windows(extent: int, side: int, *, shifted: bool = True) -> int:
    """How many windows of `side` pixels cover `extent` pixels.

    shifted: False for the fewest.  True: one more where that gives more shifts, but one where the image fits into one.

    >>> [num_windows(extent, 4) for extent in (3, 4, 5, 8, 9)], num_windows(8, 4, shifted=False)
    ([1, 1, 2, 3, 3], 2)
    """
    least = -(-extent // side)
    beyond = least * side - extent
    return least + 1 if shifted and least > 1 and side - 1 - beyond > beyond + 1 else least


def shifts(extent: int, side: int) -> Interval:
    """The shifts with which `num_windows` windows cover the extent, and none is outside of it.

    >>> shifts(5, 4), shifts(8, 4)
    (Interval(start=0, stop=4), Interval(start=1, stop=4))
    """
    least = -(-extent // side)
    beyond = least * side - extent
    return Interval(0, beyond + 1) if num_windows(extent, side) == least else Interval(beyond + 1, side)


def window_at(number: int, side: int, shift: int = 0) -> Interval:
    """Window `number` of a cover, which may reach beyond the image.

    >>> window_at(1, 4, shift=3)
    Interval(start=1, stop=5)
    """
    return Interval(number * side - shift, (number + 1) * side - shift)
