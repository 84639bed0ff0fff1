"""Labels as NumPy's .npy, without names or colours, for which the format has no place."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from widefield.geometry.box import slices
from widefield.image_files.label_image import LabelImage, ReadLabels

LABEL_SUFFIX = ".npy"


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """(H, W) or (D, H, W) numbers."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=labels.dtype, shape=labels.size)
    for box in labels.blocks(1024):
        array[slices(box)] = read(box)
    array.flush()
