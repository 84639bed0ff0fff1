"""The map of an image on the grid of its target, an image of `scale` times as many pixels along each dim.

Pixel i of the image is pixels s i to s i + s - 1 of the target, so position x of the one is s x + (s - 1) / 2 of the other.
Flips, crops and turns by 90 degrees stay exact.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from widefield.data.spatial.axis_warp import AxisMap, AxisWarp
from widefield.data.spatial.coordinate_map import CoordinateMap
from widefield.data.spatial.elastic import Elastic
from widefield.data.spatial.warp import Warp
from widefield.geometry.box import Box, covering, enlarged, hull


def enlarged_map(map: CoordinateMap | AxisMap, scale: int) -> CoordinateMap | AxisMap:
    """The map of the target; `map` itself with a scale of 1.  NotImplementedError: displacements, which are of one grid."""
    if scale == 1:
        return map
    if isinstance(map, CoordinateMap) and any(isinstance(element, Elastic) for element in map.chain):
        raise NotImplementedError(f"an elastic displacement has no map on a grid of {scale} times the pixels; leave it out")
    source, output = (tuple(scale * extent for extent in size) for size in (map.source, map.output))
    if isinstance(map, AxisMap):
        start = tuple(scale * at + (0 if sign > 0 else scale - 1) for sign, at in zip(map.sign, map.start, strict=True))
        return AxisMap(source, output, map.sign, start)
    grid = np.array([[scale, 0, (scale - 1) / 2], [0, scale, (scale - 1) / 2], [0, 0, 1]])
    back = np.linalg.inv(grid)
    chain = tuple(grid @ element @ back for element in map.chain)
    return CoordinateMap((source[0], source[1]), (output[0], output[1]), chain)


def _warp_of_target(warp: Warp | AxisWarp, channels: int, scale: int) -> Warp | AxisWarp:
    fill = warp.fill if len(warp.fill) in (1, channels) else (sum(warp.fill) / len(warp.fill),)
    return replace(warp, map=enlarged_map(warp.map, scale), fill=fill)  # type: ignore[arg-type]


def source_box(warp: Warp | AxisWarp, window: Box, scale: int) -> Box:
    """The pixels of the image that a window of the output needs, of the image and of its target."""
    box = warp.source_box(window)
    if scale == 1:
        return box
    of_target = _warp_of_target(warp, 1, scale).source_box(enlarged(window, scale))
    return hull(box, covering(of_target, scale))


def moved_target(warp: Warp | AxisWarp, target: Tensor, box: Box, window: Box, scale: int) -> Tensor:
    """The target's pixels of a window of the output.  target: (K, *pixels), its pixels of `box`; box, window: of the image."""
    warp = _warp_of_target(warp, len(target), scale)
    made, _ = warp.view(target, None, enlarged(box, scale), enlarged(window, scale), outside=None)
    return made
