"""GeoJSON (RFC 7946) of regions and of polygons: one feature at a time is written, and a file is read as a whole.

Written features have the properties `class`, `number` and, for QuPath, `objectType` and `classification`.  Coordinates are of
the image's own system, which the member `crs` names as GeoJSON did before 2016, and QGIS and GDAL read it; longitude and
latitude have no such member.  Those of an image without a place in the world are pixels, as QuPath has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.outlines.place import LONGITUDE_LATITUDE, Georeference, name_of
from widefield.outlines.tracing import Array, Outline


@dataclass(frozen=True)
class Legend:
    """The names of classes, by number, and their colours."""

    names: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]


def write_outlines(path: Path, regions: Iterable[Outline], legend: Legend, place: Georeference | None = None) -> None:
    """Write a FeatureCollection with a Polygon for each region.  place: None: coordinates are pixels."""
    head: dict[str, Any] = {"type": "FeatureCollection"}
    name = None if place is None or not place.world else name_of(place.world)
    if name is not None:
        head["crs"] = {"type": "name", "properties": {"name": name}}
    elif place is not None and not place.world:
        head["crs"] = None
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "features": [')
        for number, region in enumerate(regions):
            file.write((",\n" if number else "\n") + json.dumps(_feature(region, legend, place), separators=(",", ":")))
        file.write("\n]}\n")


def _feature(region: Outline, legend: Legend, place: Georeference | None) -> dict[str, Any]:
    name, colour = legend.names[region.number], list(legend.colours[region.number])
    about = {"objectType": "annotation", "classification": {"name": name, "color": colour}}
    rings = []
    for ring in region.rings:
        points = ring if place is None else place.to_world(ring.astype(np.float64))
        points = points[::-1] if place is not None and place.mirrors else points
        rings.append([*points.tolist(), points[0].tolist()])
    geometry = {"type": "Polygon", "coordinates": rings}
    return {
        "type": "Feature",
        "properties": {"class": name, "number": region.number, **region.properties, **about},
        "geometry": geometry,
    }


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Feature:
    """number: in the file, from 1.  polygons: of each its rings, (N, 2) float64 coordinates."""

    number: int
    properties: Mapping[str, Any]
    polygons: tuple[tuple[Array, ...], ...]


@dataclass(frozen=True)
class VectorFile:
    """features: in the file's order.  system: the name of the coordinate system; "": of none that is known."""

    path: Path
    features: tuple[Feature, ...]
    system: str = LONGITUDE_LATITUDE


def read_geojson(path: Path) -> VectorFile:
    """The polygons of a file: a FeatureCollection, a Feature, or a list of these, as QuPath writes it.

    ValueError, with the file and the feature: it is none of them, or has other geometries than polygons.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no GeoJSON ({error}); export it again") from None
    kind = tree.get("type") if isinstance(tree, dict) else None
    found = tree.get("features") if kind == "FeatureCollection" else [tree] if kind == "Feature" else tree
    if not isinstance(found, list) or not all(isinstance(one, dict) and one.get("type") == "Feature" for one in found):
        raise ValueError(f"{path} holds no features of GeoJSON; export it as a FeatureCollection of polygons")
    features = tuple(read_feature(path, number, one) for number, one in enumerate(found, start=1))
    return VectorFile(path, features, _system(path, tree))


def _system(path: Path, tree: Any) -> str:
    if not isinstance(tree, dict) or "crs" not in tree:
        return LONGITUDE_LATITUDE
    crs = tree["crs"]
    if crs is None:
        return ""
    properties = crs.get("properties") if isinstance(crs, dict) else None
    name = properties.get("name") if isinstance(properties, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            f"the crs of {path} is {json.dumps(crs)[:80]}, and not a name; export it again with one, as EPSG:32632"
        )
    return name


def read_feature(path: Path, number: int, tree: Mapping[str, Any]) -> Feature:
    """The feature of GeoJSON with this number.  ValueError: it has no polygon."""
    geometry, properties = tree.get("geometry"), tree.get("properties")
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    if kind not in ("Polygon", "MultiPolygon"):
        raise ValueError(
            f"feature {number} of {path} is {'without a geometry' if kind is None else f'a {kind}'}, and labels are made of "
            "polygons; remove it, or draw its area"
        )
    assert isinstance(geometry, dict)
    parts: Any = [geometry.get("coordinates")] if kind == "Polygon" else geometry.get("coordinates")
    try:
        polygons = tuple(tuple(_points(ring) for ring in part) for part in parts or ())
    except (TypeError, ValueError) as error:
        raise ValueError(f"the coordinates of feature {number} of {path} are damaged ({error}); draw it again") from None
    if not polygons or not all(polygons):
        raise ValueError(f"feature {number} of {path} is a polygon without points; remove it")
    return Feature(number, properties if isinstance(properties, dict) else {}, polygons)


def _points(ring: Sequence[Any]) -> Array:
    """(N, 2) of a ring; a height is left out.  ValueError: it is none."""
    points = np.array([point[:2] for point in ring], dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 4 or not np.isfinite(points).all():
        raise ValueError(f"a ring is to have at least four points of two numbers, and this has {len(points)}")
    return points


def rings_in(file: VectorFile) -> Iterator[tuple[Feature, tuple[Array, ...]]]:
    """Each polygon's rings with the feature that it is of."""
    for feature in file.features:
        for rings in feature.polygons:
            yield feature, rings
