"""overview.png: image, prediction, truth and disagreement side by side, for those who look no further."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from widefield.viewer.pyramid import Array, Place, TileGrid

MOST_PX = 2048
"""The longest side of the picture."""
TITLE_PX, GAP_PX, ENLARGED_PX = 24, 8, 384
"""The height of a panel's title, the space between panels, and up to where small images are enlarged."""
BACKGROUND, INK, WRONG, NO_CLASS = (27, 29, 32), (232, 230, 225), (255, 64, 48), (110, 114, 120)


def arrangement(panels: int, height: int, width: int) -> tuple[int, float]:
    """Columns of panels, and the scale at which images of a size fit: the greatest; of equal ones, more columns.

    >>> [arrangement(4, *size)[0] for size in ((1000, 1000), (4000, 1000), (1000, 4000))]
    [2, 4, 1]
    """

    def scale(columns: int) -> float:
        rows = -(-panels // columns)
        across = (MOST_PX - GAP_PX * (columns + 1)) / columns
        down = (MOST_PX - GAP_PX * (rows + 1)) / rows - TITLE_PX
        return min(across / width, down / height)

    columns = max(range(1, panels + 1), key=lambda one: (scale(one), one))
    return columns, scale(columns)


def overview_level(panels: int, grid: TileGrid) -> int:
    """The finest level at which all panels fit.  The coarsest does: up to four fit in two columns."""
    _, scale = arrangement(panels, grid.height, grid.width)
    return min(grid.levels - 1, max(0, math.ceil(-math.log2(scale))))


@dataclass
class Panels:
    """Pictures of one slice, put together from tiles.  level: of these.  pixels: by name, (H, W, 3) uint8."""

    grid: TileGrid
    level: int
    pixels: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, place: Place, shown: Array) -> None:
        """shown: (H, W, 3) of a tile of that level."""
        rows, columns = self.grid.window(place)
        whole = self.pixels.setdefault(name, np.empty((*self.grid.size_at(self.level), 3), np.uint8))
        whole[rows.start : rows.stop, columns.start : columns.stop] = shown


def coloured(numbers: Array, colours: list[tuple[int, int, int]]) -> Array:
    """(H, W, 3) of the page's numbers."""
    table = np.array(colours, dtype=np.uint8)
    shown = table[(numbers.astype(np.int64) - 1) % len(table)]
    shown[numbers == 0] = NO_CLASS
    return shown


def marked(share: Array, image: Array) -> Array:
    """(H, W, 3): where a share of the pixels is wrong, in red, the more the brighter, over the darkened image (H, W, 3)."""
    dark = image.astype(np.float32) * 0.3
    strength = np.where(share > 0, 0.4 + 0.6 * share, 0)[:, :, None]
    return (dark * (1 - strength) + np.array(WRONG) * strength).round().astype(np.uint8)


def draw(panels: Mapping[str, Array], titles: Mapping[str, str], path: Path) -> None:
    """Write the picture.  panels: (H, W, 3) of one size, by name."""
    height, width = next(iter(panels.values())).shape[:2]
    factor = max(1, ENLARGED_PX // max(height, width))
    height, width = factor * height, factor * width
    columns, _ = arrangement(len(panels), height, width)
    rows = -(-len(panels) // columns)
    step = width + GAP_PX, height + GAP_PX + TITLE_PX
    picture = Image.new("RGB", (GAP_PX + columns * step[0], GAP_PX + rows * step[1]), BACKGROUND)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(15)
    for number, (name, pixels) in enumerate(panels.items()):
        left, top = GAP_PX + number % columns * step[0], GAP_PX + number // columns * step[1]
        pen.text((left, top + 2), titles.get(name, name), INK, font)
        panel = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        picture.paste(panel, (left, top + TITLE_PX))
    picture.save(path, "PNG")
