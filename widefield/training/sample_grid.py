"""Grids of images that were made of noise, one file per evaluation, and one of as many real images.

Image number n of an evaluation is made of noise that depends on n alone, so the places of grids compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.data.image import write_image
from widefield.training.thumbnails import Thumbnail

COLUMNS = 6
SAMPLED = {"first": COLUMNS**2, "longest_px": 96}
"""Of which images there are thumbnails, and how large these are."""
REAL = "samples/real.png"
GAP_PX = 2


def made_file(step: int) -> str:
    return f"samples/made_{step:08}.png"


def write_grid(folder: Path, pieces: Sequence[Thumbnail], *, step: int) -> dict[str, Any]:
    """Write the grids of an evaluation after so many steps; returns what the report needs besides the files."""
    (folder / "samples").mkdir(exist_ok=True)
    write_image(grid_of([piece.prediction for piece in pieces]), folder / made_file(step))
    write_image(grid_of([piece.truth for piece in pieces]), folder / REAL)
    return {"images": len(pieces), "size": list(pieces[0].size)}


def grid_of(images: Sequence[Tensor]) -> Tensor:
    """(1 or 3, H, W) uint8 images in rows of COLUMNS, with white lines between them; the last row may be shorter."""
    channels = len(images[0])
    high, wide = (max(image.shape[dim] for image in images) + GAP_PX for dim in (1, 2))
    rows, columns = -(-len(images) // COLUMNS), min(COLUMNS, len(images))
    grid = torch.full((channels, rows * high - GAP_PX, columns * wide - GAP_PX), 255, dtype=torch.uint8)
    for number, image in enumerate(images):
        top, left = number // COLUMNS * high, number % COLUMNS * wide
        grid[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return grid
