"""A run of a small segmentation, a scene for it, and its labels as they are without windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from widefield.comm.mesh import World
from widefield.image_files import open_image
from widefield.prediction import wide
from widefield.prediction.raw_labels import RawLabels
from widefield.prediction.session import Predicted, Wishes, predict_files

PAGE = [
    "mesh.space=[]", "data.options.size=[48,40]", "data.options.pages=[6,5]", "model.options.widths=[4,6]", "mesh.replicate=1",
    "schedule.length=2step", "schedule.warmup=1step", "log.tensorboard=false", "precision=float64",
]  # fmt: skip
PLACE = (0.3, 0.05, 500_000.1, 0.02, -0.3, 4_600_000.7)
"""Of GeoTIFFs: from column, row and 1 to x and y in EPSG:32632."""


def patched(monkeypatch) -> None:
    """Every image is wide, and cut into tiles of 64 pixels."""
    monkeypatch.setattr(wide, "WIDE_PIXELS", 1)
    monkeypatch.setattr(wide, "TILE", {2: 64, 3: 16})
    monkeypatch.setattr(wide, "HEARD_SECONDS", 0.01)


def predicted(run: Path, scene: Path, output: Path, *overrides: str, **wishes) -> Predicted:
    drawn = str(run / "drawn.safetensors")
    return predict_files(run, [scene], list(overrides), World(), output=output, wishes=Wishes(**wishes), weights=drawn)


def as_zarr(pixels: np.ndarray, path: Path) -> None:
    """pixels: (C, H, W) of uint8."""
    array = pytest.importorskip("zarr").create_array(
        str(path), shape=pixels.shape, chunks=(1, 64, 64), dtype="uint8", dimension_names=["c", "y", "x"]
    )
    array[:] = pixels


def as_geotiff(pixels: np.ndarray, path: Path, **options) -> Path:
    """pixels: (C, H, W)."""
    import rasterio

    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2], "dtype": pixels.dtype.name}
    kind = {"driver": "GTiff", "tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}
    with rasterio.open(path, "w", crs="EPSG:32632", transform=rasterio.Affine(*PLACE), **about, **kind, **options) as file:
        file.write(pixels)
    return path


class Stopped(Exception):
    """Of a test."""


def stop_after(monkeypatch, count: int) -> list[int]:
    """From now on the window behind the next `count` cannot be written; returns how many were."""
    write, written = RawLabels.write, [0]

    def counted(self, window, labels):
        if written[0] == count:
            raise Stopped
        written[0] += 1
        write(self, window, labels)

    monkeypatch.setattr(RawLabels, "write", counted)
    return written


def reason(run: Path, scene: Path, output: Path, *overrides: str, **wishes) -> str:
    """Why the image was left out; nothing of it is there."""
    found = predicted(run, scene, output, *overrides, **wishes)
    (left,) = found.lefts
    assert not found.answers and left.path == str(scene) and not list(output.glob("scene*"))
    return left.reason


def labels_in(found: Predicted) -> np.ndarray:
    assert not found.lefts
    with open_image(found.answers[0].labels) as image:
        return image.read()[0]
