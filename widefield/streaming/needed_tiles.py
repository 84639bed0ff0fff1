"""Which tiles have to run where an earlier run has written a part of the result, and which units to get back to gradients?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from widefield.capture.ir import Value
from widefield.geometry.box import Box, is_empty, meet
from widefield.streaming.schedule import FusedRegion, StreamedTile, TileSchedule
from widefield.streaming.storage.result_writer import ResultWriter
from widefield.streaming.tile_planner import TracedOp


def needed_tiles(program: TileSchedule, writers: Mapping[Value, ResultWriter]) -> Mapping[FusedRegion, set[int]]:
    """The numbers of the tiles of each segment that make what is not written, or what such tiles read.  For a single rank."""
    read: dict[Value, list[Box]] = {}
    complete = {value for value in program.graph.results if value not in writers or value in program.read_again}
    found = {}
    for stage in reversed(program.stages):
        for segment in reversed(stage.segments):
            tiles = [tile for tile in segment.tiles if segment.parts or _is_needed(tile, writers, read, complete)]
            found[segment] = {tile.number for tile in tiles}
            for tile in tiles:
                for value, box in tile.sources.items():
                    read.setdefault(value, []).append(box)
        complete.update(value for unit in stage.once for value in unit.reads)
    return found


def _is_needed(
    tile: StreamedTile, writers: Mapping[Value, ResultWriter], read: Mapping[Value, list[Box]], complete: set[Value]
) -> bool:
    """read: the boxes of values that later tiles read.  complete: values of which all is needed."""
    for value, box in tile.kept.items():
        if value in complete or (value in writers and not writers[value].has(box)):
            return True
        if any(not is_empty(meet(box, other)) for other in read.get(value, ())):
            return True
    return False


def units_with_gradient(units: Sequence[TracedOp], has_grad: Callable[[Value], bool]) -> list[TracedOp]:
    """The units whose results have a gradient, and those whose results they read; draws are not run again."""
    found: list[TracedOp] = []
    needed: set[Value] = set()
    for unit in reversed(units):
        outs = [out for out in unit.outs if out is not None]
        asked = any(out.wants_grad and (out in needed or has_grad(out)) for out in outs)
        if not unit.node.draws and (asked or any(out in needed for out in outs)):
            found.append(unit)
            needed.update(unit.reads)
    return found[::-1]
