"""Small TIFFs of every kind that tiff.py reads, for the tests of all formats: how pixels are laid out, compressed and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.image_files.orientation import upright

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TiffExample:
    """write: a file of (C, *axes) pixels."""

    shape: tuple[int, ...]
    dtype: str
    write: Callable[[Path, Array], None]


def _written(arrange: Callable[[Array], Array], **options: Any) -> Callable[[Path, Array], None]:
    """By one call of tifffile's, of the pixels as `arrange` has them."""

    def write(path: Path, pixels: Array) -> None:
        import tifffile

        tifffile.imwrite(path, np.ascontiguousarray(arrange(pixels)), **options)

    return write


def _one_channel(pixels: Array) -> Array:
    return pixels[0]


def _channels_last(pixels: Array) -> Array:
    return np.moveaxis(pixels, 0, -1)


def _channels_first(pixels: Array) -> Array:
    return pixels


def _depth_first(pixels: Array) -> Array:
    return pixels.swapaxes(0, 1)


def _inverted(pixels: Array) -> Array:
    return 255 - pixels[0]


def _lying(pixels: Array) -> Array:
    """What orientation 6 shows upright; 8 turns back what 6 turns."""
    return upright(pixels[0], 8)


def _with_levels(path: Path, pixels: Array) -> None:
    """OME-TIFF with two smaller images in SubIFDs, the second of a size that does not divide the first."""
    import tifffile

    options: dict[str, Any] = {"tile": (32, 16), "compression": "zlib", "photometric": "minisblack"}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(pixels, subifds=2, metadata={"axes": "CYX"}, **options)
        for step in (2, 4):
            writer.write(np.ascontiguousarray(pixels[:, ::step, ::step]), subfiletype=1, **options)


def _aperio(path: Path, pixels: Array) -> None:
    """A slide with a thumbnail and two smaller images as pages."""
    import tifffile

    whole = np.ascontiguousarray(_channels_last(pixels))
    options: dict[str, Any] = {"photometric": "rgb", "metadata": None}
    tiles = {**options, "tile": (32, 32), "compression": "zlib"}
    with tifffile.TiffWriter(path) as writer:
        said = "Aperio Image Library v12.0.15\r\n90x70 [0,0 90x70] (32x32) |AppMag = 20|MPP = 0.4990"
        writer.write(whole, description=said, **tiles)
        writer.write(whole[::8, ::8], description="Aperio Image Library v12.0.15\r\nthumbnail", **options)
        for step in (2, 4):
            writer.write(whole[::step, ::step], description="Aperio Image Library v12.0.15\r\nlevel", **tiles)


GREY, DEFLATED = {"photometric": "minisblack"}, {"photometric": "minisblack", "compression": "zlib"}
SMALL_TILES = {"tile": (16, 16)}
PLANES = {**DEFLATED, "planarconfig": "separate"}
RAW_PLANES = {**GREY, "planarconfig": "separate", "rowsperstrip": 7}
CLASSES = {"photometric": "palette", "colormap": np.arange(768, dtype=np.uint16).reshape(3, 256) * 60}
ALPHA = {"photometric": "rgb", "extrasamples": ["unassalpha"], "compression": "zstd", "tile": (32, 16)}
TURNED = {**GREY, "tile": (16, 32), "extratags": [(274, 3, 1, 6, True)]}
VOXELS = {**DEFLATED, "tile": (16, 16, 16), "volumetric": True}
OME_STACK = {**DEFLATED, **SMALL_TILES, "metadata": {"axes": "CZYX"}}
OME_COLOURS = {"photometric": "rgb", "compression": "zlib", "metadata": {"axes": "YXS"}}

EXAMPLES = {
    "planar.tif": TiffExample((5, 40, 53), "float32", _written(_channels_first, **PLANES, **SMALL_TILES, predictor=3)),
    "plain.tif": TiffExample((3, 37, 50), "uint8", _written(_channels_last, photometric="rgb")),
    "strips.tif": TiffExample(
        (1, 61, 47), "uint16", _written(_one_channel, **GREY, rowsperstrip=5, compression="lzw", predictor=True)
    ),
    "raw_strips.tif": TiffExample((2, 45, 33), "float32", _written(_channels_first, **RAW_PLANES)),
    "tiles.tif": TiffExample((4, 70, 90), "uint8", _written(_channels_last, **ALPHA)),
    "big_endian.tif": TiffExample((2, 33, 44), "int16", _written(_channels_first, **PLANES, byteorder=">", rowsperstrip=8)),
    "raw_big_endian.btf": TiffExample((1, 33, 44), "float64", _written(_one_channel, byteorder=">", bigtiff=True)),
    "bits.tif": TiffExample((1, 29, 43), "bool", _written(_one_channel, **GREY)),
    "white_is_zero.tif": TiffExample((1, 30, 41), "uint8", _written(_inverted, photometric="miniswhite", **SMALL_TILES)),
    "lying.tif": TiffExample((1, 35, 52), "uint8", _written(_lying, **TURNED)),
    "classes.tif": TiffExample((1, 40, 31), "uint8", _written(_one_channel, **CLASSES)),
    "jpeg.tif": TiffExample(
        (3, 70, 91), "uint8", _written(_channels_last, photometric="rgb", compression="jpeg", tile=(32, 32))
    ),
    "pages.tif": TiffExample((3, 31, 27), "uint16", _written(_channels_first, **GREY)),
    "depth.tif": TiffExample((1, 6, 31, 27), "uint8", _written(_one_channel, **GREY, compression="packbits")),
    "voxels.tif": TiffExample((1, 20, 35, 50), "int16", _written(_one_channel, **VOXELS)),
    "stack.ome.tif": TiffExample((2, 5, 30, 43), "uint16", _written(_channels_first, **OME_STACK)),
    "colours.ome.tif": TiffExample((3, 40, 51), "uint8", _written(_channels_last, **OME_COLOURS)),
    "levels.ome.tif": TiffExample((2, 91, 70), "uint16", _with_levels),
    "slide.svs": TiffExample((3, 70, 90), "uint8", _aperio),
    "imagej.tif": TiffExample((2, 5, 30, 43), "uint16", _written(_depth_first, imagej=True, metadata={"axes": "ZCYX"})),
}
"""By name; .ome.tif is one that tifffile writes OME-XML into.  Pillow cannot read the first."""
