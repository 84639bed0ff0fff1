"""Masks that are polygons in GeoJSON or a shapefile: the class of each pixel, on the image's grid, window by window.

A pixel has the class of the last polygon in the file that its centre is in; one that is in none has the class `background`, or
does not count.  Where an image has a place in the world, coordinates are longitude and latitude, or what the file's `crs` says,
and are taken to the image's coordinate system; of any other image they are pixels, as QuPath has them.  A shapefile says its
system in the .prj beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from widefield.data import BadImageError
from widefield.data.image import size_of
from widefield.data.masks import ignored_label
from widefield.data.windowed_files import windowed
from widefield.geometry import Interval
from widefield.naming import did_you_mean
from widefield.outlines.filling import Polygon, filled, polygon
from widefield.outlines.geojson import Feature, VectorFile, read_geojson, rings_in
from widefield.outlines.place import LONGITUDE_LATITUDE, Georeference, place_of, transformed
from widefield.outlines.shapefiles import SUFFIX as SHAPEFILE
from widefield.outlines.shapefiles import read_shapefile

READERS = {".geojson": read_geojson, ".shp": read_shapefile}
SUFFIXES = tuple(READERS)
UNREAD = (".gpkg", ".kml", ".gml", ".fgb", ".parquet")
"""Of other files of polygons, which no library here reads."""
BACKGROUND = "background"
USUAL = ("class", "classification", "label", "name")
"""Properties that are taken for the class, the first that a feature has."""
MOST_OPEN = 16
"""Files whose polygons a process keeps."""


def is_vector(file: Path) -> bool:
    """Whether a mask is polygons.  ValueError: they are in a format that is not read here."""
    suffix = file.suffix.lower()
    if suffix in UNREAD:
        raise ValueError(
            f"the mask {file} is {suffix}, and polygons are read from GeoJSON and shapefiles; write them so: "
            f"ogr2ogr {file.with_suffix('.geojson').name} {file.name}"
        )
    return suffix in SUFFIXES


def read_vectors(file: Path) -> VectorFile:
    """ValueError: the file cannot be read."""
    return READERS[file.suffix.lower()](file)


@dataclass(frozen=True)
class ClassesOfPolygons:
    """Which class a polygon has.

    names: of the classes.  number_of: their numbers by the text of the property.  key: the property; None: one of USUAL.
    outside: the label of pixels in no polygon.
    """

    names: tuple[str, ...]
    number_of: tuple[tuple[str, int], ...]
    key: str | None
    outside: int

    @property
    def dtype(self) -> str:
        return "uint8" if ignored_label(len(self.names)) >= 0 else "int64"


@dataclass(frozen=True)
class PolygonMask:
    """The target `pixels`: polygons on the pixels of an image."""

    file: Path
    image: Path
    classes: ClassesOfPolygons
    by_window: ClassVar[bool] = True

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        """(H, W) class numbers.  BadImageError: the file cannot be read."""
        try:
            polygons = self._polygons()
            height, width = size_of(self.image)
        except (OSError, ValueError) as error:
            raise BadImageError(f"cannot read the mask {self.file} ({error})") from None
        rows, columns = window or (Interval(0, height), Interval(0, width))
        about = {"outside": self.classes.outside, "dtype": self.classes.dtype}
        return torch.from_numpy(filled(polygons, (rows, columns), **about))  # type: ignore[arg-type]

    def _polygons(self) -> list[Polygon]:
        return _polygons(self.file, _stamp(self.file), self.image, _stamp(self.image), self.classes)

    def problem(self) -> str | None:
        """Why the file does not fit its image, in words; None: it does."""
        try:
            size, polygons = size_of(self.image), self._polygons()
        except (OSError, ValueError) as error:
            return str(error)
        if len(size) != 2:
            return f"{self.image} is a volume, and {self.file} has polygons, which are flat; give its labels as a volume"
        if (
            polygons
            and max(max(right - left, bottom - top) for left, top, right, bottom in (one.extent for one in polygons)) < 1
        ):
            left, top, _, _ = polygons[0].extent
            return (
                f"no polygon of {self.file} is as large as a pixel of {self.image}: the first is at column {left:g} and row "
                f"{top:g}; are these longitudes and latitudes, and has the image no place in the world?"
            )
        if polygons and not any(_meets(one, size) for one in polygons):
            left, top, right, bottom = polygons[0].extent
            return (
                f"no polygon of {self.file} lies on {self.image}: the first is at columns {left:,.0f} to {right:,.0f} and rows "
                f"{top:,.0f} to {bottom:,.0f} of {size[1]:,} x {size[0]:,} pixels; is its coordinate system right?"
            )
        return None


def classes_of_polygons(given: Any, files: Sequence[Path], key: str | None, outside: str) -> tuple[ClassesOfPolygons, str]:
    """The classes of all polygons, and where they are known from, in words.

    given: None: all that the property has, by name; or names in their order; or names with the property's values.
    key: the property; None: one of USUAL.  outside: "background" or "ignore", what pixels in no polygon are.
    ValueError: the options, or a polygon's class, with the file and the feature.
    """
    if outside not in (BACKGROUND, "ignore"):
        raise ValueError(f"data.options.outside is {outside!r}; pixels in no polygon are background, or ignore leaves them out")
    if given is not None and (isinstance(given, str) or not isinstance(given, Sequence | Mapping) or not given):
        raise ValueError(f"data.options.classes is {given!r}; of polygons give a list of names, or names with values")
    pairs = {str(name): str(value) for name, value in given.items()} if isinstance(given, Mapping) else None
    if given is None:
        found = {_class_in(one, feature, key) for one in files for feature in read_vectors(one).features}
        names = sorted(found - {BACKGROUND})
    else:
        names = list(map(str, given))
    if outside == BACKGROUND and BACKGROUND not in names:
        names = [BACKGROUND, *names]
    values = [(pairs or {}).get(name, name) for name in names]
    if len(set(values)) < len(values):
        raise ValueError(f"data.options.classes has one class twice: {', '.join(values)}; give each its own")
    number = names.index(BACKGROUND) if outside == BACKGROUND else ignored_label(len(names))
    classes = ClassesOfPolygons(tuple(names), tuple((value, at) for at, value in enumerate(values)), key, number)
    why = "found in polygons" if given is None else "as given"
    return classes, f"{why}; pixels in none are {BACKGROUND if outside == BACKGROUND else 'left out'}"


@lru_cache(maxsize=MOST_OPEN)
def _polygons(
    file: Path, stamp: tuple[int, int], image: Path, of_image: tuple[int, int], classes: ClassesOfPolygons
) -> list[Polygon]:
    """Those of a file, in pixels of the image.  stamp, of_image: of both, so that what was changed is read again."""
    vectors, number_of = read_vectors(file), dict(classes.number_of)
    opened = windowed(image)
    place = None if opened is None else place_of(opened.info)
    if file.suffix.lower() == SHAPEFILE and not vectors.system and place is not None and place.world:
        raise ValueError(
            f"{file} does not say its coordinate system, and its image has a place in the world; put it beside, as "
            f"{file.with_suffix('.prj').name}, or export the file with it"
        )
    found = []
    for feature, rings in rings_in(vectors):
        name = _class_in(file, feature, classes.key)
        if name not in number_of:
            raise ValueError(
                f"feature {feature.number} of {file} has the class {name!r}, and data.options.classes has no such one"
                f"{did_you_mean(name, list(number_of))}; add it there"
            )
        found.append(polygon(number_of[name], [_in_pixels(ring, vectors, feature, place) for ring in rings]))
    return found


def _in_pixels(ring: np.ndarray, vectors: VectorFile, feature: Feature, place: Georeference | None) -> np.ndarray:
    """ValueError: the coordinates are not of the system that the file says, or have no place in the image's."""
    where = f"feature {feature.number} of {vectors.path}"
    if place is None and vectors.system not in ("", LONGITUDE_LATITUDE):
        raise ValueError(
            f"{where} is in the coordinate system {vectors.system[:80]}, and its image has no place in the world; give it "
            "one, or write polygons in pixels, without a crs"
        )
    if place is None:
        return ring
    if vectors.system == LONGITUDE_LATITUDE and (np.abs(ring) > (360, 90)).any():
        raise ValueError(
            f"{where} has the coordinates {ring[0].tolist()}, which are no longitude and latitude, as GeoJSON without a crs "
            "has them; export it with its coordinate system, or in EPSG:4326"
        )
    if vectors.system and place.world:
        ring = transformed(ring, vectors.system, place.world)
    if not np.isfinite(ring).all():
        raise ValueError(f"{where} has no place in the coordinate system of its image; remove it, or mend its coordinates")
    return place.to_pixels(ring)


def _class_in(file: Path, feature: Feature, key: str | None) -> str:
    """The text of the property.  QuPath's `classification` has a name in it.  ValueError: the feature has no such property."""
    keys = USUAL if key is None else (key,)
    for one in keys:
        value = feature.properties.get(one)
        value = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and not isinstance(value, list):
            return str(value)
    raise ValueError(
        f"feature {feature.number} of {file} has no property {' or '.join(keys)}; it has "
        f"{', '.join(map(str, feature.properties)) or 'none'}: name the one that says the class, as data.options.property=KIND"
    )


def _meets(one: Polygon, size: tuple[int, ...]) -> bool:
    left, top, right, bottom = one.extent
    return left < size[1] and right > 0 and top < size[0] and bottom > 0


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns
