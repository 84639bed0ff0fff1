"""Which tiles of a segment compute something, and which few of them represent all?  For grids of thousands of tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from widefield.capture.ir import Value
from widefield.geometry.box import size_of
from widefield.geometry.layout import Grid, Layout
from widefield.streaming.tile_planner import TracedOp


class TileSampling:
    """The tiles of a virtual grid, and the pixels that each makes of the values with a layout on it."""

    def __init__(self, grid: Grid, layouts: Mapping[Value, Layout]) -> None:
        self.grid, self.layouts = grid, layouts
        self._pixels: dict[Layout, list[int]] = {}
        self._firsts: dict[tuple[int, ...], list[int]] = {}
        inside = [[min(at, size - 1 - at) for at in range(size)] for size in grid.sizes]
        self._depths = _rows(inside)

    def tiles(self, kept: Sequence[Value], parts: Sequence[TracedOp]) -> list[int]:
        """The numbers of the tiles that make pixels of the values in `kept` or a part of the sums in `parts`."""
        made = [self._pixels_of(self.layouts[value]) for value in kept] + [self._first(unit.axes) for unit in parts]
        return [number for number, found in enumerate(zip(*made, strict=True)) if any(found)]

    def samples(self, tiles: Sequence[int], kept: Sequence[Value], parts: Sequence[TracedOp]) -> list[tuple[int, float]]:
        """For each group of tiles with the same number of inner axes: the index of one tile, and the size of the group.

        The tile is the largest and, of several, the one farthest from the image's edges, which has the largest halos.  The size
        is the pixels of the group divided by those of this tile.
        """
        summed = [value for unit in parts for value in unit.reads if value in self.layouts]
        sizes = [self._pixels_of(self.layouts[value]) for value in (*kept, *summed)]
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for place, number in enumerate(tiles):
            depths = self._depths[number]
            pixels = sum(found[number] for found in sizes)
            groups.setdefault(sum(depth > 0 for depth in depths), []).append((pixels, sum(depths), -place))
        return [(-max(found)[2], sum(pixels for pixels, *_ in found) / max(1, max(found)[0])) for found in groups.values()]

    def _pixels_of(self, layout: Layout) -> list[int]:
        """The pixels that each tile makes; of tiles that would make the same pixels, only the first does."""
        if layout not in self._pixels:
            self._pixels[layout] = self._counted(layout)
        return self._pixels[layout]

    def _counted(self, layout: Layout) -> list[int]:
        cuts = [cut for cut in layout.cuts if cut is not None]
        if any(len(cut.axes) > 1 for cut in cuts):
            first = self._first(layout.axes)
            return [one * math.prod(size_of(layout.box_of(number))) for number, one in enumerate(first)]
        whole = math.prod(extent for extent, cut in zip(layout.shape, layout.cuts, strict=True) if cut is None)
        lengths = [[1, *[0] * (size - 1)] for size in self.grid.sizes]
        for cut in cuts:
            lengths[cut.axes[0]] = [stop - start for start, stop in zip(cut.bounds, cut.bounds[1:], strict=False)]
        return [whole * math.prod(at) for at in _rows(lengths)]

    def _first(self, axes: Sequence[int]) -> list[int]:
        """1 for each tile with coordinate 0 on all axes but `axes`, else 0."""
        key = tuple(axes)
        if key not in self._firsts:
            rows = [[1] * size if axis in key else [1, *[0] * (size - 1)] for axis, size in enumerate(self.grid.sizes)]
            self._firsts[key] = [math.prod(at) for at in _rows(rows)]
        return self._firsts[key]


def _rows(numbers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For every place of a grid, in order, the number that each axis has there."""
    found: list[tuple[int, ...]] = [()]
    for along in numbers:
        found = [(*before, number) for before in found for number in along]
    return found
