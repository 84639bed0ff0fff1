"""GeoTIFF, COG and JPEG 2000, by rasterio: bands with a place on the Earth, nodata, masks and overviews.

A TIFF is one of them if it has a place (tags 33550, 34264, 34735, or a .tfw beside it) or says what nodata is (42113); others
are in tiff.py.

`info.affine` takes (row, column) of a pixel's centre to (x, y) of `info.world`, which is the coordinate system as WKT.  Pixels
are as stored: no scale or offset of a band is applied, and a palette's stay class numbers.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.image_files import tags
from widefield.image_files.block_sizes import advice_on
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import Affine, ImageInfo, Level, spacing_of

NAME = "GeoTIFF"
SUFFIXES = (".tif", ".tiff", ".gtiff", ".jp2", ".j2k")
EXTRA = "geo"
PRIORITY = 10
JPEG_2000 = (b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")
"""How a .jp2 file and a bare codestream begin."""
SETTINGS = {"GDAL_CACHEMAX": 64 * 2**20, "GDAL_NUM_THREADS": "1", "GDAL_DISABLE_READDIR_ON_OPEN": "TRUE"}
"""GDAL would keep decoded blocks in 5 % of the machine's memory, in each process.  TRUE: no folder is listed at each opening,
and files beside the image, as .msk, are found by their names all the same."""
CONVERT = "write it once in tiles: rasterio.shutil.copy(file, 'tiled.tif', driver='COG', compress='deflate')"
COLOURS = {("gray",): "L", ("gray", "alpha"): "LA", ("red", "green", "blue"): "RGB", ("red", "green", "blue", "alpha"): "RGBA"}


def claims(path: Path, start: bytes) -> bool:
    if start.startswith(JPEG_2000):
        return True
    places = {tags.GEO_PIXEL_SCALE, tags.GEO_TRANSFORM, tags.GEO_KEYS, tags.GDAL_NODATA}
    return tags.is_tiff(start) and (path.with_suffix(".tfw").exists() or not places.isdisjoint(tags.read_tags(path)))


def open_image(path: Path) -> ImageFile:
    return GeoTiffFile(path, GeoTiffFile.read_info(path))


class GeoTiffFile(ImageFile):
    """Its handle is one of rasterio's datasets for each level, opened when the level is first read."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        if not _is_jpeg_2000(path):
            tags.check_first_image(path)
        with gdal(), _opened(path) as dataset:
            overviews = {tuple(dataset.overviews(band)) for band in dataset.indexes}
            count = len(min(overviews, key=len)) if len(overviews) == 1 else 0
            levels = [_size(dataset)]
            for number in range(count):
                with _opened(path, overview_level=number) as smaller:
                    levels.append(_size(smaller))
            return _info(dataset, levels)

    def open_handle(self) -> dict[int, Any]:
        return {}

    def close_handle(self, handle: dict[int, Any]) -> None:
        for dataset in handle.values():
            dataset.close()
        handle.clear()

    def read_box(self, handle: dict[int, Any], box: Box, level: int) -> Array:
        with gdal():
            return self._dataset(handle, level).read(window=_window(box))

    def valid_box(self, handle: dict[int, Any], box: Box, level: int, pixels: Array) -> Array | None:
        """By a mask in the file or beside it (.msk), or by alpha."""
        from rasterio.enums import MaskFlags

        with gdal():
            dataset = self._dataset(handle, level)
            flags = {flag for band in dataset.mask_flag_enums for flag in band}
            if not flags & {MaskFlags.per_dataset, MaskFlags.alpha}:
                return None
            return dataset.dataset_mask(window=_window(box)) > 0

    def _dataset(self, handle: dict[int, Any], level: int) -> Any:
        if level not in handle:
            handle[level] = _opened(self.path) if level == 0 else _opened(self.path, overview_level=level - 1)
        return handle[level]


@contextmanager
def gdal() -> Iterator[None]:
    """With the settings above, except for those that the environment has."""
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.session import DummySession

    mine = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    with rasterio.Env(session=DummySession(), **mine), warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # it may have nodata and no place
        yield


def _is_jpeg_2000(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12).startswith(JPEG_2000)


def _opened(path: Path, **options: Any) -> Any:
    """By the driver of its format alone: GDAL knows files that name others, or hold formulas."""
    import rasterio
    from rasterio.drivers import raster_driver_extensions

    driver = "GTiff"
    if _is_jpeg_2000(path):
        driver = next((name for name in sorted(raster_driver_extensions().values()) if name.startswith("JP2")), "")
        if not driver:
            raise ValueError("this build of GDAL has no driver for JPEG 2000; save it as GeoTIFF")
    return rasterio.open(path, driver=driver, **options)


def _window(box: Box) -> Any:
    from rasterio.windows import Window

    rows, columns = box
    return Window(columns.start, rows.start, len(columns), len(rows))


def _size(dataset: Any) -> Level:
    """Its scale is put in by `_info`."""
    rows, columns = dataset.block_shapes[0]
    size = (dataset.height, dataset.width)
    return Level(size, (min(rows, size[0]), min(columns, size[1])), (1.0, 1.0))


def _info(dataset: Any, levels: list[Level]) -> ImageInfo:
    import rasterio

    if len(set(dataset.dtypes)) > 1 or np.dtype(dataset.dtypes[0]).kind not in "iuf":
        raise ValueError(f"its bands are {', '.join(dict.fromkeys(dataset.dtypes))}; save them with one type of real numbers")
    dtype, colours = np.dtype(dataset.dtypes[0]), tuple(one.name for one in dataset.colorinterp)
    affine, palette = _affine(dataset), _palette(dataset) if colours == ("palette",) else ()
    structure, is_jp2 = dataset.tags(ns="IMAGE_STRUCTURE"), dataset.driver.startswith("JP2")
    together = dataset.count if structure.get("INTERLEAVE") == "PIXEL" else 1
    advice = advice_on(levels[0], together, dtype.name, CONVERT)
    nodata = tuple(_fitting(number, dtype) for number in dataset.nodatavals)
    names = ("palette",) if palette else tuple(name or "" for name in dataset.descriptions)
    return ImageInfo(
        format="JPEG 2000" if is_jp2 else "COG" if structure.get("LAYOUT") == "COG" else NAME,
        reader=f"rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}", axes="YX", channels=dataset.count,
        dtype=dtype.name, levels=_scaled(levels), colours=COLOURS.get(colours, ""), palette=palette,
        channel_names=names if any(names) else (), spacing=spacing_of(affine), unit=_unit(dataset.crs) if affine else "",
        affine=affine, world=dataset.crs.to_wkt() if dataset.crs else "",
        nodata=nodata if any(number is not None for number in nodata) else (),
        compression=structure.get("COMPRESSION", "jpeg2000" if is_jp2 else "").lower(), by_window=not advice, advice=advice,
    )  # fmt: skip


def _scaled(levels: list[Level]) -> tuple[Level, ...]:
    whole = levels[0].size
    return tuple(Level(one.size, one.block, (whole[0] / one.size[0], whole[1] / one.size[1])) for one in levels)


def _affine(dataset: Any) -> Affine:
    """From the centre of a pixel, while GDAL's begins at its corner; () where the file has no place."""
    at = dataset.transform
    if at.is_identity:
        return ()
    x, y = at.c + (at.a + at.b) / 2, at.f + (at.d + at.e) / 2
    return ((at.b, at.a, x), (at.e, at.d, y), (0.0, 0.0, 1.0))


def _unit(crs: Any) -> str:
    """The length of 1 in the world: deg, m, or as the coordinate system has it."""
    if not crs:
        return ""
    if crs.is_geographic:
        return "deg"
    return {"metre": "m", "meter": "m"}.get(crs.linear_units, crs.linear_units)


def _fitting(number: float | None, dtype: np.dtype[Any]) -> float | None:
    """None: no pixel of this type can be that."""
    if number is None or dtype.kind == "f":
        return number
    limits = np.iinfo(dtype)
    if math.isnan(number) or number != int(number) or not limits.min <= number <= limits.max:
        return None
    return int(number)


def _palette(dataset: Any) -> tuple[tuple[int, ...], ...]:
    """(red, green, blue, alpha) by class number."""
    found = dataset.colormap(1)
    return tuple(found.get(number, (0, 0, 0, 255)) for number in range(max(found) + 1))


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (C, H, W).  The name says how; see _HOW."""
    import rasterio
    from rasterio.shutil import copy
    from rasterio.transform import Affine as Transform

    how = dict(_HOW[path.name])
    overviews, driver = how.pop("overviews", ()), how.pop("driver", "GTiff")
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2], "dtype": pixels.dtype.name}
    plain = path if driver == "GTiff" else path.with_suffix(".plain.tif")
    with gdal():
        place = Transform(10.0, 0.0, 500_000.0, 0.0, -10.0, 4_600_000.0)
        with rasterio.open(plain, "w", driver="GTiff", crs="EPSG:32632", transform=place, **about, **how) as dataset:
            dataset.write(pixels)
            if overviews:
                dataset.build_overviews(overviews, rasterio.enums.Resampling.nearest)
        if driver != "GTiff":
            copy(plain, path, driver=driver, **_COPIED[driver])
            plain.unlink()


_HOW: dict[str, dict[str, Any]] = {
    "strips.tif": {},
    "tiles.tif": {"tiled": True, "blockxsize": 32, "blockysize": 16, "compress": "deflate", "predictor": 2, "nodata": 7},
    "bands.tif": {"tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "lzw", "interleave": "band"},
    "levels.tif": {"tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "zstd", "overviews": (2, 4)},
    "big_endian.tif": {"ENDIANNESS": "BIG", "BIGTIFF": "YES", "compress": "deflate"},
    "cloud.tif": {"driver": "COG"},
    "lossless.jp2": {"driver": "JP2OpenJPEG"},
}
"""By name: options of GDAL's; with a driver, the file is copied by it."""
_COPIED: dict[str, dict[str, Any]] = {
    "COG": {"compress": "deflate", "blocksize": 128, "overview_resampling": "nearest"},
    "JP2OpenJPEG": {"QUALITY": "100", "REVERSIBLE": "YES"},
}
CASES = [
    ("strips.tif", (3, 37, 50), "uint8"),
    ("tiles.tif", (1, 70, 91), "uint16"),
    ("bands.tif", (5, 40, 53), "float32"),
    ("levels.tif", (4, 91, 70), "int16"),
    ("big_endian.tif", (2, 33, 44), "float64"),
    ("cloud.tif", (3, 300, 210), "uint8"),
    ("lossless.jp2", (3, 80, 120), "uint8"),
]
