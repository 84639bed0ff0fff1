"""Orientation, tag 274 of TIFF and EXIF: which way up the stored rows and columns are shown.

1 is as stored; 2 to 4 are mirrored or turned by 180 degrees; 5 to 8 swap rows and columns as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval

Array = np.ndarray[Any, Any]

_TURNS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, True, False), 7: (True, True, True), 8: (True, False, True),
}  # fmt: skip
"""By orientation: whether rows and columns are swapped, after the stored rows and the stored columns were reversed."""


def swaps(orientation: int) -> bool:
    """Whether the upright image has the stored columns as rows."""
    return _TURNS[orientation][0]


def stored_box(upright: Box, size: tuple[int, int], orientation: int) -> Box:
    """The stored rows and columns that a box of the upright image comes from.  size: (rows, columns) as stored.

    >>> stored_box((Interval(0, 2), Interval(0, 3)), (10, 20), 6)
    (Interval(start=7, stop=10), Interval(start=0, stop=2))
    """
    swapped, rows_back, columns_back = _TURNS[orientation]
    rows, columns = reversed(upright) if swapped else upright
    if rows_back:
        rows = Interval(size[0] - rows.stop, size[0] - rows.start)
    if columns_back:
        columns = Interval(size[1] - columns.stop, size[1] - columns.start)
    return rows, columns


def upright(stored: Array, orientation: int) -> Array:
    """A view of (..., rows, columns) as it is to be shown.

    >>> upright(np.array([[1, 2], [3, 4]]), 6).tolist()
    [[3, 1], [4, 2]]
    """
    swapped, rows_back, columns_back = _TURNS[orientation]
    turned = stored[..., :: -1 if rows_back else 1, :: -1 if columns_back else 1]
    return turned.swapaxes(-1, -2) if swapped else turned
