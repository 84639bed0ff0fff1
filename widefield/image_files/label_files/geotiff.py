"""Labels as GeoTIFF, by rasterio: the place of their image to the last bit, a colour table, nodata, and smaller levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widefield.image_files.formats.geotiff import gdal
from widefield.image_files.label_image import LabelImage, ReadLabels

LABEL_SUFFIX = ".tif"
BLOCK = 512


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """One band in deflated blocks; its levels are the most frequent class of the pixels that they cover.

    The names of classes are in the tag CLASSES, as JSON, and so are the notes, in tags of their names.
    """
    import rasterio
    from rasterio.enums import Resampling
    from rasterio.windows import Window

    height, width = labels.size
    with gdal():
        with rasterio.open(labels.source) as image:
            place: dict[str, Any] = {"crs": image.crs, "transform": image.transform}
        with rasterio.open(
            path, "w", driver="GTiff", height=height, width=width, count=1, dtype=labels.dtype, nodata=labels.nodata,
            tiled=True, blockxsize=BLOCK, blockysize=BLOCK, compress="deflate", BIGTIFF="IF_SAFER", **place,
        ) as file:  # fmt: skip
            for rows, columns in labels.blocks(BLOCK):
                window = Window(columns.start, rows.start, len(columns), len(rows))
                file.write(read((rows, columns)), 1, window=window)
            file.write_colormap(1, dict(enumerate(labels.table())))
            file.set_band_description(1, "class")
            file.update_tags(CLASSES=json.dumps(list(labels.classes)), **labels.notes)
            smaller = [2**step for step in range(1, labels.levels(BLOCK))]
            if smaller:
                file.build_overviews(smaller, Resampling.mode)
