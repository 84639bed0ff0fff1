"""The examples that every format of image files brings: CASES are (format, file, shape, dtype), and the pixels of one."""

from __future__ import annotations

import numpy as np

from widefield.naming import load, names_in

FORMATS = names_in("widefield.image_files.formats")
CASES = [(name, *case) for name in FORMATS for case in load("widefield.image_files.formats", name).CASES]


def pixels_of(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Smooth in space, so that lossy codecs stay close, and different in each channel and row."""
    grid = np.meshgrid(*(np.arange(extent) for extent in shape), indexing="ij")
    values = sum((3 + 4 * number) * part for number, part in enumerate(grid)) % 251
    return values.astype(dtype)
