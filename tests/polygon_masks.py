"""Folders of images with masks that are polygons, and what rasterio makes of the same polygons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, open_dataset

SQUARE = np.array([[10.0, 10.0], [40.0, 10.0], [40.0, 30.0], [10.0, 30.0]])
SIZE = (90, 70)
PLACE = (10.0, 1.0, 500_000.0, 0.5, -10.0, 4_600_000.0)
"""From column, row and 1 to x and y in EPSG:32632."""


def to_world(points: np.ndarray) -> np.ndarray:
    a, b, c, d, e, f = PLACE
    return np.stack([a * points[:, 0] + b * points[:, 1] + c, d * points[:, 0] + e * points[:, 1] + f], 1)


def stars(seed: int) -> list[tuple[str, np.ndarray]]:
    """Classes and rings, in pixels."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(6):
        centre, angles = random.uniform(0, 80, 2), np.sort(random.uniform(0, 2 * np.pi, 9))
        star = centre + random.uniform(5, 40, 9)[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
        found.append((("forest", "road", "water")[number % 3], star))
    return found


def feature(name: str, ring: np.ndarray, **properties) -> dict:
    geometry = {"type": "Polygon", "coordinates": [[*ring.tolist(), ring[0].tolist()]]}
    return {"type": "Feature", "properties": {"class": name, **properties}, "geometry": geometry}


def collection(features: list[dict], **more) -> dict:
    return {"type": "FeatureCollection", "features": features, **more}


def save(root: Path, trees: list, *, geotiff: bool, suffix: str = ".geojson") -> Path:
    """An image for each tree of GeoJSON, or for each array of a mask."""
    for number, tree in enumerate(trees):
        (root / "images").mkdir(parents=True, exist_ok=True)
        (root / "masks").mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (3, *SIZE)).astype(np.uint8)
        if geotiff:
            _save_geotiff(root / "images" / f"scene{number}.tif", pixels)
        else:
            Image.fromarray(np.moveaxis(pixels, 0, -1)).save(root / "images" / f"scene{number}.png")
        (root / "masks" / f"scene{number}{suffix}").write_text(json.dumps(tree))
    return root


def _save_geotiff(path: Path, pixels: np.ndarray) -> None:
    rasterio = pytest.importorskip("rasterio")
    about = {"count": 3, "height": SIZE[0], "width": SIZE[1], "dtype": "uint8", "crs": "EPSG:32632"}
    with rasterio.open(path, "w", driver="GTiff", transform=rasterio.Affine(*PLACE), **about) as file:
        file.write(pixels)


def opened(root: Path, **options) -> Dataset:
    return open_dataset(DataConfig(name="masks", path=str(root), hold_out=0.34, options=options))


def read_all(dataset: Dataset) -> dict[str, np.ndarray]:
    """Labels by the name of the image."""
    found = {}
    for side in (dataset.train, dataset.evaluate):
        found |= {Path(side.name_of(index)).stem: side.read(index)[1].numpy() for index in range(len(side))}
    return found


def rasterized(shapes: list[tuple[str, np.ndarray]], names: list[str], transform=None) -> np.ndarray:
    features = pytest.importorskip("rasterio.features")
    geometries = [(feature(name, ring)["geometry"], names.index(name)) for name, ring in shapes]
    more = {} if transform is None else {"transform": transform}
    return features.rasterize(geometries, SIZE, fill=0, dtype="uint8", **more)
