"""Where an image's pixels lie in the world: from corners of pixels to coordinates and back, and the name of their system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from widefield.image_files.info import ImageInfo

Array = np.ndarray[Any, Any]
LONGITUDE_LATITUDE = "urn:ogc:def:crs:OGC:1.3:CRS84"
"""What coordinates of GeoJSON are where it does not say otherwise: RFC 7946, 4."""


@dataclass(frozen=True)
class Georeference:
    """matrix: 3 x 3, from (x, y, 1), pixels from the corner of the first one, to coordinates.  world: their system as WKT."""

    matrix: Array
    world: str = ""

    def to_world(self, points: Array) -> Array:
        """(N, 2) coordinates of (N, 2) pixels."""
        return points @ self.matrix[:2, :2].T + self.matrix[:2, 2]

    def to_pixels(self, points: Array) -> Array:
        return (points - self.matrix[:2, 2]) @ np.linalg.inv(self.matrix[:2, :2]).T

    @property
    def mirrors(self) -> bool:
        """Whether a counterclockwise ring of pixels is clockwise in coordinates, as where north is up."""
        return bool(np.linalg.det(self.matrix[:2, :2]) < 0)


def place_of(info: ImageInfo) -> Georeference | None:
    """Of an image with a place on the Earth, or in a plane; None: of any other, whose outlines are in pixels."""
    if len(info.affine) != 3:
        return None
    (down_x, right_x, x), (down_y, right_y, y) = info.affine[0], info.affine[1]
    corner = x - (down_x + right_x) / 2, y - (down_y + right_y) / 2
    matrix = np.array([[right_x, down_x, corner[0]], [right_y, down_y, corner[1]], [0.0, 0.0, 1.0]])
    return Georeference(matrix, info.world)


def name_of(world: str) -> str | None:
    """By which GeoJSON's member `crs` names a coordinate system; None: it is longitude and latitude, which needs none."""
    from rasterio.crs import CRS

    known = CRS.from_wkt(world).to_authority()
    if known in (("EPSG", "4326"), ("OGC", "CRS84")):
        return None
    return world if known is None else f"urn:ogc:def:crs:{known[0]}::{known[1]}"


def transformed(points: Array, source: str, target: str) -> Array:
    """(N, 2) coordinates of the system `source` in `target`; not finite where they have none there.

    ValueError: a system is not known.
    """
    try:
        from rasterio.crs import CRS
        from rasterio.errors import CRSError
        from rasterio.warp import transform
    except ImportError:
        raise ValueError(
            "other coordinate systems than the image's are read by rasterio; pip install 'widefield[geo]'"
        ) from None
    try:
        one, other = (CRS.from_user_input("OGC:CRS84" if name == LONGITUDE_LATITUDE else name) for name in (source, target))
    except CRSError as error:
        raise ValueError(f"its coordinate system {source[:80]} is not known ({error})") from None
    if one == other:
        return points
    x, y = transform(one, other, points[:, 0].tolist(), points[:, 1].tolist())
    return np.stack([np.array(x), np.array(y)], 1)
