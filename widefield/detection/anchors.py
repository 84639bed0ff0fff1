"""Where the places of a detector's maps lie in the whole image, and the anchors of each.

Level l has a map of ceil(H / strides[l]) x ceil(W / strides[l]) places, whatever a rank has of it.  The anchors of the place in
row i and column j lie about the point (j, i) * step.  The step is the level's stride; torchvision's is image // map, which is
the same where the sides are multiples of the stride, and elsewhere less: 63 in place of 64 for 20,000 px, so that the last
anchors of that level are 312 px from what their place sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True)
class MapLevels:
    """strides: pixels of the image per place, of each level.  as_torchvision: see the top."""

    strides: tuple[int, ...]
    as_torchvision: bool = False

    def maps_of(self, size: Size) -> list[Size]:
        """The (rows, columns) of each level's map for an image of `size`."""
        return [(-(-size[0] // stride), -(-size[1] // stride)) for stride in self.strides]

    def steps_of(self, size: Size) -> list[Size]:
        """The distance of neighbouring places, (down, across), of each level."""
        if not self.as_torchvision:
            return [(stride, stride) for stride in self.strides]
        return [(size[0] // rows, size[1] // columns) for rows, columns in self.maps_of(size)]


def cell_anchors(sizes: Sequence[int], ratios: Sequence[float]) -> Tensor:
    """(A, 4) of one place at (0, 0): each ratio of height to width with each size, the root of the area; as torchvision's."""
    scales = torch.as_tensor(sizes, dtype=torch.float32)
    heights = torch.as_tensor(ratios, dtype=torch.float32).sqrt()
    widths = 1 / heights
    ws, hs = ((sides[:, None] * scales[None, :]).view(-1) for sides in (widths, heights))
    return (torch.stack([-ws, -hs, ws, hs], dim=1) / 2).round()


def anchors_on(map_size: Size, step: Size, cell: Tensor, like: Tensor) -> Tensor:
    """(rows * columns * A, 4) of all places, row by row.  like: a tensor of the dtype and on the device that they shall
    have."""
    down, across = (torch.arange(count, device=like.device) * by for count, by in zip(map_size, step, strict=True))
    y, x = torch.meshgrid(down, across, indexing="ij")
    places = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4).to(like.dtype)
    return (places + cell.to(like)).reshape(-1, 4)


def anchors_of_levels(
    levels: MapLevels, sizes: Sequence[Sequence[int]], ratios: Sequence[float], size: Size, like: Tensor
) -> list[Tensor]:
    """(n, 4) of each level of an image of `size`.  sizes: of each level's anchors, in pixels; ratios, like: see above."""
    cells = [cell_anchors(own, ratios) for own in sizes]
    places = zip(levels.maps_of(size), levels.steps_of(size), cells, strict=True)
    return [anchors_on(*place, like) for place in places]


def values_of_places(map_BCHW: Tensor, values: int) -> Tensor:
    """(B, rows * columns * A, values) from a map (B, A * values, rows, columns), in the order of `anchors_on`."""
    batch, channels, rows, columns = map_BCHW.shape
    split = map_BCHW.view(batch, channels // values, values, rows, columns)
    return split.permute(0, 3, 4, 1, 2).reshape(batch, -1, values)
