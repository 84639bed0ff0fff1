"""TIFF, BigTIFF, OME-TIFF, ImageJ's, and the slides that are TIFFs (SVS, NDPI, SCN, QPTIFF), by tifffile.

Pixels are the file's, with these exceptions: where white is 0 they are inverted, the orientation of tag 274 is followed unless
a microscope's format has its own, and JPEG's YCbCr becomes RGB.  A palette's pixels stay numbers; its colours are in `info`.
Of a file of several series the first is read.  GeoTIFF is in geotiff.py, slides whose tiles overlap in slide.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.geometry.interval import Interval
from widefield.image_files import tiff_facts as facts
from widefield.image_files.block_sizes import advice_on
from widefield.image_files.formats import picture
from widefield.image_files.formats._tiff_examples import EXAMPLES
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, Level
from widefield.image_files.orientation import stored_box, swaps, upright
from widefield.image_files.tags import check_chain, check_end, check_values, is_tiff
from widefield.image_files.tiff_pages import PageOrder, PageReader, page_order

NAME = "TIFF"
SUFFIXES = (".tif", ".tiff", ".btf", ".tf8", ".ome.tif", ".ome.tiff", ".svs", ".ndpi", ".qptiff", ".lsm", ".stk")
EXTRA = "tiff"
PRIORITY = 0
PLAIN = ("", "generic", "uniform", "shaped")
"""Kinds of series, in tifffile's words, that follow TIFF 6.0 alone."""
SLIDES = ("svs", "ndpi", "philips", "scn", "avs")
"""Kinds whose empty tiles are glass without tissue."""
CONVERT = (
    "write it once in tiles: tifffile.imwrite('tiled.tif', tifffile.imread(file), tile=(512, 512), compression='zlib', "
    "photometric='rgb' or 'minisblack')"
)


def claims(path: Path, start: bytes) -> bool:
    return is_tiff(start)


def open_image(path: Path) -> ImageFile:
    """Without tifffile, by Pillow if it reads all of the file."""
    try:
        info = TiffFile.read_info(path)
    except ModuleNotFoundError as error:
        if error.name != "tifffile":
            raise
        try:
            return picture.PictureFile(path, picture.PictureFile.read_info(path))
        except Exception:  # of many pages, or with bits that Pillow would cut
            raise error from None
    return TiffFile(path, info)


class TiffFile(ImageFile):
    """Its handle is tifffile's file, and a reader for each level."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        file, readers = _opened(path)
        with file:
            for reader in readers:
                reader.check()
            if readers[0].series.kind != "ndpi":  # whose places have 64 bits, in two parts
                check_values(path)
            if readers[0].series.kind in PLAIN:
                check_chain(path)
            return _info(file, readers)

    def open_handle(self) -> tuple[Any, list[PageReader]]:
        return _opened(self.path)

    def close_handle(self, handle: tuple[Any, list[PageReader]]) -> None:
        handle[0].close()

    def read_box(self, handle: tuple[Any, list[PageReader]], box: Box, level: int) -> Array:
        reader = handle[1][level]
        series = handle[1][0].series
        pixels = reader.read(_stored(reader, series, box))
        if int(series.keyframe.photometric) == facts.WHITE_IS_ZERO and pixels.dtype.kind in "bu":
            _invert(pixels, int(series.keyframe.bitspersample))
        pixels = upright(pixels, _orientation(series))
        return pixels if len(box) == 3 else pixels[:, 0]

    def valid_box(self, handle: tuple[Any, list[PageReader]], box: Box, level: int, pixels: Array) -> Array | None:
        """Of slides: where there are no tiles, nothing was scanned."""
        reader, series = handle[1][level], handle[1][0].series
        if series.kind not in SLIDES:
            return None
        found = reader.filled(_stored(reader, series, box))
        if found is None:
            return None
        found = upright(found, _orientation(series))
        return found if len(box) == 3 else found[0]


def _opened(path: Path) -> tuple[Any, list[PageReader]]:
    """tifffile's file, and a reader for each level.  ValueError: it holds no image, or several."""
    import tifffile

    file = tifffile.TiffFile(path)
    try:
        if not file.is_ndpi:  # whose places have 64 bits, in two parts
            check_end(path)  # before tifffile looks for all of them
        if file.is_ome and file.ome_metadata:
            facts.ome_of(file.ome_metadata)  # before tifffile believes its numbers
        series = file.series[0]
        _check_kind(file, series)
        others = [one for one in file.series if one.shape == series.shape]
        if series.kind == "ome" and len(others) > 1:
            size = " x ".join(map(str, series.shape))
            raise ValueError(
                f"it holds {len(others)} images of {size} ({series.axes}), as of several positions; save one a file"
            )
        dtype = series.keyframe.dtype
        if dtype is None or dtype.kind not in "biuf":
            raise ValueError(f"its pixels are {dtype or 'of a kind that tifffile does not know'}; save real numbers")
        facts.require_codec(series.keyframe)
        return file, [PageReader(one, _fill(series)) for one in _levels(series)]
    except Exception:
        file.close()
        raise


def _check_kind(file: Any, series: Any) -> None:
    """ValueError: tifffile could not follow what a file says of its pages, and took fewer.  BinaryOnly says nothing of them."""
    if file.is_ome and series.kind != "ome" and "BinaryOnly" not in (file.ome_metadata or ""):
        raise ValueError(
            "its pages are not those that its OME-XML tells of: it is cut short, or was changed by another program"
        )
    if file.is_imagej and series.kind not in ("imagej", "ome", "mmstack"):
        raise ValueError(
            "its pages are not those that ImageJ's text tells of: it is cut short, or was changed by another program"
        )


def _levels(series: Any) -> list[Any]:
    """Those that are the same image at other sizes."""
    first = page_order(series)
    same = [series]
    for level in series.levels[1:]:
        if level.keyframe.dtype != series.keyframe.dtype or not _same_image(page_order(level), first):
            break
        same.append(level)
    return same


def _same_image(level: PageOrder, first: PageOrder) -> bool:
    return (level.all_channels, level.axes) == (first.all_channels, first.axes)


def _fill(series: Any) -> int:
    """Glass is white."""
    page = series.keyframe
    return (
        255 if series.kind in SLIDES and page.dtype == np.uint8 and facts.colours_of(page, page.samplesperpixel) == "RGB" else 0
    )


def _orientation(series: Any) -> int:
    """Tag 274, where nothing else says which way up the image is."""
    said = series.keyframe.tags.valueof(274, default=1)
    return int(said) if series.kind in PLAIN and said in range(1, 9) else 1


def _stored(reader: PageReader, series: Any, box: Box) -> Box:
    """A box of the image as the box (Z, Y, X) of its file."""
    _, _, height, width, _ = reader.blocks.shape
    rows, columns = stored_box(box[-2:], (height, width), _orientation(series))
    return (box[0] if len(box) == 3 else Interval(0, 1), rows, columns)


def _invert(pixels: Array, bits: int) -> None:
    """In place."""
    if pixels.dtype == bool:
        np.logical_not(pixels, out=pixels)
    else:
        np.subtract(pixels.dtype.type(2**bits - 1), pixels, out=pixels)


def _info(file: Any, readers: list[PageReader]) -> ImageInfo:
    import tifffile

    series, order = readers[0].series, readers[0].order
    page, channels = series.keyframe, order.all_channels
    ome = facts.ome_of(file.ome_metadata) if series.kind == "ome" else None
    levels = _sizes(readers, order.axes, turned=swaps(_orientation(series)))
    spacing = facts.spacing_by_axis(file, page, ome)
    if swaps(_orientation(series)) and spacing:
        spacing = {**spacing, "X": spacing.get("Y", 0.0), "Y": spacing.get("X", 0.0)}
    known = all(spacing.get(axis) for axis in order.axes)
    advice = advice_on(levels[0], order.channels if page.planarconfig == 1 else 1, page.dtype.name, CONVERT)
    return ImageInfo(
        format=_format(file, series), reader=f"tifffile {tifffile.__version__}", axes=order.axes, channels=channels,
        dtype=page.dtype.name, levels=levels, colours=facts.colours_of(page, channels),
        channel_names=facts.channel_names(page, channels, ome), palette=facts.palette_of(page),
        spacing=tuple(spacing[axis] for axis in order.axes) if known else (), unit="um" if known else "",
        compression=facts.compression_of(page), by_window=not advice, advice=advice,
    )  # fmt: skip


def _sizes(readers: list[PageReader], axes: str, *, turned: bool) -> tuple[Level, ...]:
    levels: list[Level] = []
    for reader in readers:
        _, _, height, width, _ = reader.blocks.shape
        size, block = (reader.order.all_depth, height, width), (1, 1, 1) if reader.raw else reader.blocks.block
        if turned:
            size, block = (size[0], width, height), (block[0], block[2], block[1])
        own, blocks = size[-len(axes) :], tuple(map(min, zip(block, size, strict=True)))[-len(axes) :]
        first = levels[0].size if levels else own
        levels.append(Level(own, blocks, tuple(large / small for large, small in zip(first, own, strict=True))))
    return tuple(levels)


def _format(file: Any, series: Any) -> str:
    """The name of the kind in the field."""
    names = {
        "ome": "OME-TIFF",
        "imagej": "ImageJ TIFF",
        "svs": "SVS",
        "ndpi": "NDPI",
        "scn": "SCN",
        "qpi": "QPTIFF",
        "lsm": "LSM",
    }
    return names.get(series.kind, "BigTIFF" if file.is_bigtiff else NAME)


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (C, *axes).  The name says how; see _tiff_examples.py."""
    EXAMPLES[path.name].write(path, pixels)


CASES = [(name, example.shape, example.dtype) for name, example in EXAMPLES.items()]
LOSSY = ("jpeg.tif",)
