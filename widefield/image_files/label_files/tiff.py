"""Labels as a tiled TIFF, by tifffile, with a palette and smaller levels: what QuPath, napari and other viewers open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from widefield.image_files.image_file import Array
from widefield.image_files.label_image import LabelImage, ReadLabels, read_smaller

LABEL_SUFFIX = ".tif"
BLOCK = 512


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """Deflated blocks; levels in SubIFDs, of which each pixel is the most frequent number of those that it covers.

    The names of classes and the notes are in the description, as JSON.
    """
    import tifffile

    count = labels.levels(BLOCK)
    about = json.dumps({"classes": list(labels.classes), "nodata": labels.nodata, **labels.notes})
    options: dict[str, Any] = {"tile": (BLOCK, BLOCK), "compression": "zlib", "dtype": labels.dtype, "metadata": None}
    if labels.dtype == "uint8":
        table = np.zeros((3, 256), dtype=np.uint16)
        table[:, : len(labels.table())] = 257 * np.array(labels.table()).T[:3]
        options |= {"photometric": "palette", "colormap": table}
    else:
        options |= {"photometric": "minisblack"}
    if labels.like.unit == "um" and labels.like.spacing:
        down, across = labels.like.spacing[-2:]
        options |= {"resolution": (1e4 / across, 1e4 / down), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for step in range(count):
            more = {"description": about, "subifds": count - 1} if step == 0 else {"subfiletype": 1}
            file.write(_blocks(labels, read, step), shape=labels.size_at(step), **options, **more)


def _blocks(labels: LabelImage, read: ReadLabels, step: int) -> Iterator[Array]:
    """Of a level: blocks that a file has, the last of a row or column filled up with zeros."""
    for box in labels.blocks(BLOCK, step):
        found = read_smaller(read, labels, box, step)
        yield np.pad(found, [(0, BLOCK - extent) for extent in found.shape])
