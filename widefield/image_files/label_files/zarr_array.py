"""Labels as OME-Zarr 0.5, by zarr: what napari, Fiji and Neuroglancer open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widefield.geometry.box import slices
from widefield.image_files.label_image import LabelImage, ReadLabels, read_smaller

LABEL_SUFFIX = ".zarr"
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
    unit = {"unit": _UNITS[labels.like.unit]} if labels.like.unit in _UNITS else {}
    ome: dict[str, Any] = {
        "version": "0.5",
        "multiscales": [{
            "name": path.stem,
            "axes": [{"name": axis, "type": "space", **unit} for axis in axes],
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
