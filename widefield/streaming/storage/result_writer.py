"""A result that a streamed module gives away tile by tile, so that it is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from widefield.geometry.box import Box

Window = tuple[slice, ...]


class ResultWriter:
    """write(window, tile): is called once for each tile of this rank, on the device; windows do not overlap.

    is_written(window): whether an earlier run wrote it, so that the tile need not run.
    """

    def __init__(self, write: Callable[[Window, Tensor], None], is_written: Callable[[Window], bool] | None = None) -> None:
        self._write, self._is_written = write, is_written

    def write(self, box: Box, tile: Tensor) -> None:
        if not self.has(box):
            self._write(_window(box), tile)

    def has(self, box: Box) -> bool:
        return self._is_written is not None and self._is_written(_window(box))


def _window(box: Box) -> Window:
    return tuple(slice(interval.start, interval.stop) for interval in box)
