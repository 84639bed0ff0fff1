"""Labels and probabilities as OME-Zarr 0.5, by zarr: what napari, Fiji and Neuroglancer open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widefield.geometry.box import slices
from widefield.image_files.band_image import BandImage, ReadBand
from widefield.image_files.label_image import LabelImage, ReadLabels, read_smaller

LABEL_SUFFIX = BAND_SUFFIX = ".zarr"
BLOCK = 1024


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """Levels 0, 1, ..., of which each pixel is the most frequent number of those that it covers in the last two dims."""
    import zarr

    path.mkdir()
    axes, count = labels.like.axes.lower(), labels.levels(BLOCK)
    spacing = labels.like.spacing or (1.0,) * len(axes)
    for step in range(count):
        size = labels.size_at(step)
        chunks = tuple(min(BLOCK, extent) if dim >= len(size) - 2 else 1 for dim, extent in enumerate(size))
        array = zarr.create_array(
            str(path / str(step)), shape=size, chunks=chunks, dtype=labels.dtype, dimension_names=list(axes), zarr_format=3
        )
        for box in labels.blocks(BLOCK, step):
            array[slices(box)] = read_smaller(read, labels, box, step)
    ome: dict[str, Any] = {
        "version": "0.5",
        "multiscales": [{
            "name": path.stem,
            "axes": _axes(labels),
            "datasets": [_level(step, spacing) for step in range(count)],
        }],
        "image-label": {
            "colors": [{"label-value": number, "rgba": [*colour, 255]} for number, colour in enumerate(labels.table())],
            "properties": [{"label-value": number, "class": name} for number, name in enumerate(labels.classes)],
        },
    }  # fmt: skip
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome, "widefield": dict(labels.notes)}}
    (path / "zarr.json").write_text(json.dumps(group, indent=1), encoding="utf-8")


_UNITS = {"um": "micrometer", "mm": "millimeter", "m": "meter", "nm": "nanometer"}


def _level(step: int, spacing: tuple[float, ...]) -> dict[str, Any]:
    """The centre of a level's first pixel is between those that it covers."""
    dims = len(spacing)
    scale = [size * (2**step if dim >= dims - 2 else 1) for dim, size in enumerate(spacing)]
    offset = [(whole - size) / 2 for whole, size in zip(scale, spacing, strict=True)]
    return {
        "path": str(step),
        "coordinateTransformations": [{"type": "scale", "scale": scale}, {"type": "translation", "translation": offset}],
    }


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """Levels 0, 1, ... with the classes as channels; each pixel is the mean of those that it covers."""
    import zarr

    path.mkdir()
    axes, count = bands.like.axes.lower(), bands.levels(BLOCK)
    spacing = bands.like.spacing or (1.0,) * len(axes)
    for step in range(count):
        size = bands.size_at(step)
        chunks = tuple(min(BLOCK, extent) if dim >= len(size) - 2 else 1 for dim, extent in enumerate(size))
        array = zarr.create_array(
            str(path / str(step)), shape=(len(bands.names), *size), chunks=(1, *chunks), dtype=bands.dtype,
            dimension_names=["c", *axes], zarr_format=3,
        )  # fmt: skip
        for number in range(len(bands.names)):
            for box in bands.blocks(BLOCK, step):
                index: tuple[Any, ...] = (number, *slices(box))
                array[index] = bands.read_at(read, number, box, step)
    datasets = [_level(step, spacing) for step in range(count)]
    for transform in (one for level in datasets for one in level["coordinateTransformations"]):
        transform[transform["type"]].insert(0, 1.0 if transform["type"] == "scale" else 0.0)
    white = {"start": 0, "min": 0, "end": 1 / bands.scale, "max": 1 / bands.scale}
    ome: dict[str, Any] = {
        "version": "0.5",
        "multiscales": [{
            "name": path.stem, "axes": [{"name": "c", "type": "channel"}, *_axes(bands)], "datasets": datasets,
        }],
        "omero": {"channels": [{"label": name, "color": "FFFFFF", "active": True, "window": white} for name in bands.names]},
    }  # fmt: skip
    about = {"scale": bands.scale, "nodata": str(bands.nodata), **bands.notes}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome, "widefield": about}}
    (path / "zarr.json").write_text(json.dumps(group, indent=1), encoding="utf-8")


def _axes(what: LabelImage | BandImage) -> list[dict[str, str]]:
    """The spatial ones."""
    unit = {"unit": _UNITS[what.like.unit]} if what.like.unit in _UNITS else {}
    return [{"name": axis, "type": "space", **unit} for axis in what.like.axes.lower()]
