"""Labels and probabilities as tiled TIFF, by tifffile, with smaller levels: what QuPath, napari and other viewers open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from widefield.image_files.band_image import BandImage, ReadBand
from widefield.image_files.image_file import Array
from widefield.image_files.label_image import LabelImage, ReadLabels, read_smaller

LABEL_SUFFIX = BAND_SUFFIX = ".tif"
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
    options |= _resolution(labels)
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for step in range(count):
            more = {"description": about, "subifds": count - 1} if step == 0 else {"subfiletype": 1}
            file.write(_blocks(labels, read, step), shape=labels.size_at(step), **options, **more)


def _blocks(labels: LabelImage, read: ReadLabels, step: int) -> Iterator[Array]:
    """Of a level: blocks that a file has, the last of a row or column filled up with zeros."""
    for box in labels.blocks(BLOCK, step):
        found = read_smaller(read, labels, box, step)
        yield np.pad(found, [(0, BLOCK - extent) for extent in found.shape])


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """A plane per class, in deflated blocks; levels in SubIFDs are means.  Names, scale and nodata are in the description."""
    import tifffile

    count = bands.levels(BLOCK)
    nodata = None if bands.nodata != bands.nodata else bands.nodata  # JSON has no NaN
    about = json.dumps({"classes": list(bands.names), "nodata": nodata, "scale": bands.scale, **bands.notes})
    options: dict[str, Any] = {
        "tile": (BLOCK, BLOCK), "compression": "zlib", "compressionargs": {"level": 1}, "dtype": bands.dtype,
        "metadata": None, "photometric": "minisblack", "planarconfig": "separate", **_resolution(bands),
    }  # fmt: skip
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for step in range(count):
            more = {"description": about, "subifds": count - 1} if step == 0 else {"subfiletype": 1}
            shape = (len(bands.names), *bands.size_at(step))
            file.write(_blocks_of_bands(bands, read, step), shape=shape, **options, **more)


def _blocks_of_bands(bands: BandImage, read: ReadBand, step: int) -> Iterator[Array]:
    for number in range(len(bands.names)):
        for box in bands.blocks(BLOCK, step):
            found = bands.read_at(read, number, box, step)
            yield np.pad(found, [(0, BLOCK - extent) for extent in found.shape])


def _resolution(what: LabelImage | BandImage) -> dict[str, Any]:
    """In pixels per centimetre, where the size of a pixel is known."""
    if what.like.unit != "um" or not what.like.spacing:
        return {}
    down, across = what.like.spacing[-2:]
    return {"resolution": (1e4 / across, 1e4 / down), "resolutionunit": "CENTIMETER"}
