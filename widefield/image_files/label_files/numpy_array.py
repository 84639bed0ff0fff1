"""Labels and probabilities as NumPy's .npy, without names or colours, for which the format has no place."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from widefield.geometry.box import slices
from widefield.image_files.band_image import BandImage, ReadBand
from widefield.image_files.label_image import LabelImage, ReadLabels

LABEL_SUFFIX = BAND_SUFFIX = ".npy"


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """(H, W) or (D, H, W) numbers."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=labels.dtype, shape=labels.size)
    for box in labels.blocks(1024):
        array[slices(box)] = read(box)
    array.flush()


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """(K, H, W) or (K, D, H, W) numbers."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=bands.dtype, shape=(len(bands.names), *bands.size))
    for number in range(len(bands.names)):
        for box in bands.blocks(1024):
            array[number][slices(box)] = read(number, box)
    array.flush()
