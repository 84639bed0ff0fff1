"""Shapefiles (ESRI, 1998) of polygons: NAME.shp and NAME.shx with shapes, NAME.dbf with properties, read by pyshp as a whole.

The coordinate system is the WKT in NAME.prj, and the encoding of texts is named in NAME.cpg, else UTF-8.  Without a .prj
coordinates are of no system that is known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from widefield.outlines.geojson import VectorFile, read_feature

SUFFIX = ".shp"
SYSTEM, ENCODING = ".prj", ".cpg"


def read_shapefile(path: Path) -> VectorFile:
    """The polygons of a file, in its order, with the properties of its table.

    ValueError, with the file and the feature: pyshp is not installed, a part of the file is missing or damaged, or it has other
    geometries than polygons.
    """
    try:
        from shapefile import ShapefileException
    except ImportError:
        raise ValueError(f"{path} is a shapefile, which pyshp reads; pip install 'widefield[shapefile]'") from None
    _check_parts(path)
    encoding = _text(path.with_suffix(ENCODING)) or "utf-8"
    try:
        features = tuple(read_feature(path, number, tree) for number, tree in enumerate(_trees(path, encoding), start=1))
    except (ShapefileException, OSError, EOFError, struct.error, LookupError, TypeError, AssertionError, UnicodeError) as error:
        if isinstance(error, UnicodeError) or "decode" in str(error) or "unknown encoding" in str(error):
            raise ValueError(
                f"the texts of {path.with_suffix('.dbf')} are not {encoding}; name their encoding in "
                f"{path.with_suffix(ENCODING).name}, as ISO-8859-1"
            ) from None
        raise ValueError(f"{path} cannot be read as a shapefile ({error or type(error).__name__}); export it again") from None
    return VectorFile(path, features, _system(path))


def _check_parts(path: Path) -> None:
    missing = [suffix for suffix in (".shx", ".dbf") if not path.with_suffix(suffix).is_file()]
    if missing:
        raise ValueError(
            f"{path} lacks {' and '.join(path.with_suffix(suffix).name for suffix in missing)} beside it; copy all files of "
            "the shapefile"
        )
    with path.open("rb") as file:
        start = file.read(28)
    said = 2 * struct.unpack(">i", start[24:])[0] if len(start) == 28 else 0  # counted in words of 16 bits
    if said != path.stat().st_size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes and its header says {said}; export it again")


def _trees(path: Path, encoding: str) -> Iterator[Mapping[str, Any]]:
    """Each shape as a feature of GeoJSON; a ring in another is a hole.  ValueError: there are more shapes than rows."""
    import shapefile

    with shapefile.Reader(str(path), encoding=encoding) as file:
        if len(file.shapes()) != len(file.records()):
            raise ValueError(f"{path} has {len(file.shapes())} shapes and its .dbf {len(file.records())} rows; export it again")
        for one in file.iterShapeRecords():
            geometry = None if one.shape.shapeType == shapefile.NULL else dict(one.shape.__geo_interface__)
            yield {"geometry": geometry, "properties": one.record.as_dict()}


def _system(path: Path) -> str:
    """As WKT; "" without a .prj.  ValueError: it is none."""
    text = _text(path.with_suffix(SYSTEM))
    if not text:
        return ""
    try:
        from rasterio.crs import CRS
        from rasterio.errors import CRSError
    except ImportError:
        raise ValueError(f"the coordinate system of {path} is read by rasterio; pip install 'widefield[geo]'") from None
    try:
        return str(CRS.from_wkt(text, morph_from_esri_dialect=True).to_wkt())
    except CRSError as error:
        raise ValueError(f"{path.with_suffix(SYSTEM)} is no coordinate system ({error}); export it again") from None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
