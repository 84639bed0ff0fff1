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
    path.mkdir()
    for step in range(labels.levels(BLOCK)):
        array = _new_level(path, labels, step)
        for box in labels.blocks(BLOCK, step):
            array[slices(box)] = read_smaller(read, labels, box, step)
    shown = {
        "colors": [{"label-value": number, "rgba": [*colour, 255]} for number, colour in enumerate(labels.table())],
        "properties": [{"label-value": number, "class": name} for number, name in enumerate(labels.classes)],
    }
    _write_group(path, labels, {"image-label": shown}, dict(labels.notes))


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """Levels 0, 1, ... with the classes as channels; each pixel is the mean of those that it covers."""
    count = len(bands.names)
    path.mkdir()
    for step in range(bands.levels(BLOCK)):
        array = _new_level(path, bands, step, channels=count)
        for number in range(count):
            for box in bands.blocks(BLOCK, step):
                index: tuple[Any, ...] = (number, *slices(box))
                array[index] = bands.read_at(read, number, box, step)
    white = {"start": 0, "min": 0, "end": 1 / bands.scale, "max": 1 / bands.scale}
    shown = [{"label": name, "color": "FFFFFF", "active": True, "window": white} for name in bands.names]
    about = {"scale": bands.scale, "nodata": str(bands.nodata), **bands.notes}
    _write_group(path, bands, {"omero": {"channels": shown}}, about, channels=count)


def _new_level(path: Path, what: LabelImage | BandImage, step: int, *, channels: int = 0) -> Any:
    """The array of a level.  channels: how many there are before the other dims; 0: none."""
    import zarr

    size, names = what.size_at(step), list(what.like.axes.lower())
    chunks = tuple(min(BLOCK, extent) if dim >= len(size) - 2 else 1 for dim, extent in enumerate(size))
    if channels:
        size, chunks, names = (channels, *size), (1, *chunks), ["c", *names]
    return zarr.create_array(
        str(path / str(step)), shape=size, chunks=chunks, dtype=what.dtype, dimension_names=names, zarr_format=3
    )


def _write_group(
    path: Path, what: LabelImage | BandImage, shown: dict[str, Any], about: dict[str, Any], *, channels: int = 0
) -> None:
    """What the file says of its levels.  shown: how viewers are to show it.  about: our own attributes."""
    unit = {"unit": _UNITS[what.like.unit]} if what.like.unit in _UNITS else {}
    axes = [{"name": axis, "type": "space", **unit} for axis in what.like.axes.lower()]
    spacing = what.like.spacing or (1.0,) * len(axes)
    datasets = [_level(step, spacing, is_banded=channels > 0) for step in range(what.levels(BLOCK))]
    axes = [{"name": "c", "type": "channel"}, *axes] if channels else axes
    ome = {"version": "0.5", "multiscales": [{"name": path.stem, "axes": axes, "datasets": datasets}], **shown}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome, "widefield": about}}
    (path / "zarr.json").write_text(json.dumps(group, indent=1), encoding="utf-8")


_UNITS = {"um": "micrometer", "mm": "millimeter", "m": "meter", "nm": "nanometer"}


def _level(step: int, spacing: tuple[float, ...], *, is_banded: bool) -> dict[str, Any]:
    """The centre of a level's first pixel is between those that it covers.  is_banded: whether channels come first."""
    dims = len(spacing)
    scale = [size * (2**step if dim >= dims - 2 else 1) for dim, size in enumerate(spacing)]
    offset = [(whole - size) / 2 for whole, size in zip(scale, spacing, strict=True)]
    if is_banded:
        scale, offset = [1.0, *scale], [0.0, *offset]
    return {
        "path": str(step),
        "coordinateTransformations": [{"type": "scale", "scale": scale}, {"type": "translation", "translation": offset}],
    }
