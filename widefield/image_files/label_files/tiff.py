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

    The names of classes and the notes are in the description, as JSON; of a volume it is that of OME-XML, which has the
    spacing along all three axes.
    """
    import tifffile

    count = labels.levels(BLOCK)
    about = json.dumps({"classes": list(labels.classes), "nodata": labels.nodata, **labels.notes})
    options: dict[str, Any] = {"tile": (BLOCK, BLOCK), "compression": "zlib", "dtype": labels.dtype}
    if labels.dtype == "uint8":
        table = np.zeros((3, 256), dtype=np.uint16)
        table[:, : len(labels.table())] = 257 * np.array(labels.table()).T[:3]
        options |= {"photometric": "palette", "colormap": table}
    else:
        options |= {"photometric": "minisblack"}
    options |= _resolution(labels)
    with tifffile.TiffWriter(path, bigtiff=True, ome=_is_volume(labels)) as file:
        for step in range(count):
            more = {**_described(labels, about, "ZYX"), "subifds": count - 1} if step == 0 else _SMALLER
            file.write(_blocks(labels, read, step), shape=labels.size_at(step), **options, **more)


def _blocks(labels: LabelImage, read: ReadLabels, step: int) -> Iterator[Array]:
    """Of a level: blocks that a file has, the last of a row or column filled up with zeros."""
    for box in labels.blocks(BLOCK, step):
        yield _padded(read_smaller(read, labels, box, step))


def _padded(found: Array) -> Array:
    """A block of one slice, filled up with zeros."""
    plane = found.reshape(found.shape[-2:])
    return np.pad(plane, [(0, BLOCK - extent) for extent in plane.shape])


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """A plane per class, in deflated blocks; levels in SubIFDs are means.  Names, scale and nodata are in the description."""
    import tifffile

    count = bands.levels(BLOCK)
    nodata = None if bands.nodata != bands.nodata else bands.nodata  # JSON has no NaN
    about = json.dumps({"classes": list(bands.names), "nodata": nodata, "scale": bands.scale, **bands.notes})
    options: dict[str, Any] = {
        "tile": (BLOCK, BLOCK), "compression": "zlib", "compressionargs": {"level": 1}, "dtype": bands.dtype,
        "photometric": "minisblack", **_resolution(bands),
    }  # fmt: skip
    if not _is_volume(bands):
        options["planarconfig"] = "separate"
    with tifffile.TiffWriter(path, bigtiff=True, ome=_is_volume(bands)) as file:
        for step in range(count):
            more = {**_described(bands, about, "CZYX"), "subifds": count - 1} if step == 0 else _SMALLER
            shape = (len(bands.names), *bands.size_at(step))
            file.write(_blocks_of_bands(bands, read, step), shape=shape, **options, **more)


def _blocks_of_bands(bands: BandImage, read: ReadBand, step: int) -> Iterator[Array]:
    for number in range(len(bands.names)):
        for box in bands.blocks(BLOCK, step):
            yield _padded(bands.read_at(read, number, box, step))


_SMALLER: dict[str, Any] = {"subfiletype": 1, "metadata": None}
"""Of all levels but the first."""


def _is_volume(what: LabelImage | BandImage) -> bool:
    return len(what.size) == 3


def _described(what: LabelImage | BandImage, about: str, axes: str) -> dict[str, Any]:
    """The description, and of a volume its axes and spacing."""
    if not _is_volume(what):
        return {"description": about, "metadata": None}
    spacing = dict(zip("ZYX", what.like.spacing, strict=False)) if what.like.unit == "um" else {}
    sizes = {f"PhysicalSize{axis}": length for axis, length in spacing.items()}
    return {"metadata": {"axes": axes, "Description": about, **sizes}}


def _resolution(what: LabelImage | BandImage) -> dict[str, Any]:
    """In pixels per centimetre, where the size of a pixel is known."""
    if what.like.unit != "um" or not what.like.spacing:
        return {}
    down, across = what.like.spacing[-2:]
    return {"resolution": (1e4 / across, 1e4 / down), "resolutionunit": "CENTIMETER"}
