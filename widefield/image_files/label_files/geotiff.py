"""Labels and probabilities as GeoTIFF, by rasterio: the place of their image to the last bit, nodata, and smaller levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widefield.geometry.box import Box
from widefield.image_files.band_image import BandImage, ReadBand
from widefield.image_files.formats.geotiff import gdal
from widefield.image_files.label_image import LabelImage, ReadLabels

LABEL_SUFFIX = BAND_SUFFIX = ".tif"
BLOCK = 512
LEVEL = 1
"""Of the compression of probabilities: higher ones take several times as long for little."""


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """One band in deflated blocks; its levels are the most frequent class of the pixels that they cover.

    The names of classes are in the tag CLASSES, as JSON, and so are the notes, in tags of their names.
    """
    from rasterio.enums import Resampling

    with gdal():
        with _opened(path, labels, count=1) as file:
            for box in labels.blocks(BLOCK):
                file.write(read(box), 1, window=_window(box))
            file.write_colormap(1, dict(enumerate(labels.table())))
            file.set_band_description(1, "class")
            file.update_tags(CLASSES=json.dumps(list(labels.classes)), **labels.notes)
            smaller = [2**step for step in range(1, labels.levels(BLOCK))]
            if smaller:
                file.build_overviews(smaller, Resampling.mode)


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """A band per class, one behind the other, in deflated blocks; levels are means.  BigTIFF where it may get large.

    Names are the bands' descriptions and the tag CLASSES; the scale is that of GDAL, which QGIS and others apply.
    """
    from rasterio.enums import Resampling

    count, predictor = len(bands.names), 3 if bands.dtype == "float32" else 2
    with gdal():
        with _opened(path, bands, count=count, interleave="band", predictor=predictor, zlevel=LEVEL) as file:
            for number, name in enumerate(bands.names):
                for box in bands.blocks(BLOCK):
                    file.write(read(number, box), number + 1, window=_window(box))
                file.set_band_description(number + 1, name)
            if bands.scale != 1:
                file.scales = (bands.scale,) * count
            file.update_tags(CLASSES=json.dumps(list(bands.names)), **bands.notes)
            smaller = [2**step for step in range(1, bands.levels(BLOCK))]
            if smaller:
                file.build_overviews(smaller, Resampling.average)


def _opened(path: Path, what: LabelImage | BandImage, **more: Any) -> Any:
    """A new file in the place of the image."""
    import rasterio

    height, width = what.size
    with rasterio.open(what.source) as image:
        place: dict[str, Any] = {"crs": image.crs, "transform": image.transform}
    return rasterio.open(
        path, "w", driver="GTiff", height=height, width=width, dtype=what.dtype, nodata=what.nodata,
        tiled=True, blockxsize=BLOCK, blockysize=BLOCK, compress="deflate", BIGTIFF="IF_SAFER", **place, **more,
    )  # fmt: skip


def _window(box: Box) -> Any:
    from rasterio.windows import Window

    rows, columns = box
    return Window(columns.start, rows.start, len(columns), len(rows))
