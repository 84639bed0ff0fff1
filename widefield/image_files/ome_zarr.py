"""The metadata of OME-Zarr, versions 0.1 to 0.5: the axes, levels, spacing and channel names of the images of a group.

They are JSON in `.zattrs` (Zarr 2) or in `zarr.json` (Zarr 3), which is read here without a library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widefield.image_files.info import Level
from widefield.image_files.stored_array import ArrayDims

METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs")
METRES = {
    "angstrom": 1e-10, "nanometer": 1e-9, "micrometer": 1e-6, "millimeter": 1e-3, "centimeter": 1e-2, "meter": 1.0,
    "kilometer": 1e3, "inch": 0.0254, "foot": 0.3048,
}  # fmt: skip
SHORT_UNITS = {"nanometer": "nm", "micrometer": "um", "millimeter": "mm", "meter": "m", "degree": "deg"}


@dataclass(frozen=True)
class Multiscale:
    """paths: of the arrays in the group, the full resolution first.  names, units: of their dims; a unit may be "".

    scales: of each array, the size of a pixel on each dim; () where the file does not say it.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    units: tuple[str, ...]
    scales: tuple[tuple[float, ...], ...]
    channel_names: tuple[str, ...]


def attributes_of(folder: Path) -> dict[str, Any]:
    """Those of a Zarr group or array, with `ome` taken out of its cover.  ValueError: no JSON object."""
    attributes = _json(folder / "zarr.json").get("attributes") or {} if is_version_3(folder) else _json(folder / ".zattrs")
    ome = attributes.get("ome")
    return {**attributes, **ome} if isinstance(ome, dict) else attributes


def is_version_3(folder: Path) -> bool:
    """Whether it has Zarr 3's metadata, which goes before older metadata beside it."""
    return (folder / "zarr.json").is_file()


def is_array(folder: Path) -> bool:
    """Whether a folder of Zarr is an array; otherwise it is a group."""
    if is_version_3(folder):
        return _json(folder / "zarr.json").get("node_type") == "array"
    return (folder / ".zarray").is_file()


def multiscale_of(attributes: Mapping[str, Any]) -> Multiscale | None:
    """The first image of a group; None: the group is none.  ValueError: it lacks axes, or lies outside of the group."""
    if not attributes.get("multiscales"):
        return None
    image = attributes["multiscales"][0]
    names, units = _axes(image, attributes)
    datasets = image["datasets"]
    outside = [one["path"] for one in datasets if one["path"].startswith("/") or ".." in one["path"].split("/")]
    if outside or not datasets:
        raise ValueError(f"the group's images {', '.join(outside) or '(none)'} are not inside of it")
    shared = _scale(image.get("coordinateTransformations"), len(names)) or (1.0,) * len(names)
    scales = [_scale(one.get("coordinateTransformations"), len(names)) for one in datasets]
    channels = (attributes.get("omero") or {}).get("channels") or []
    return Multiscale(
        paths=tuple(one["path"] for one in datasets),
        names=names,
        units=units,
        scales=tuple(tuple(a * b for a, b in zip(scale, shared, strict=True)) if scale else () for scale in scales),
        channel_names=tuple(str(channel.get("label") or "") for channel in channels),
    )


def levels_of(
    multiscale: Multiscale, dims: ArrayDims, shapes: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]
) -> tuple[tuple[Level, ...], str]:
    """The levels, and a sentence on those whose scale the file tells wrong; "" where there are none.

    A level's extent times its scale is the extent of level 0, but for 2 pixels of the level, since each level may lose one.
    Where the file says otherwise, as where it has the same scale for all levels, the scale is the quotient of the extents.
    """
    levels, wrong = [], []
    whole = dims.size(shapes[0])
    for number, (shape, chunk, scale) in enumerate(zip(shapes, chunks, multiscale.scales, strict=True)):
        size = dims.size(shape)
        quotients = tuple(extent / less for extent, less in zip(whole, size, strict=True))
        said = quotients
        if scale and multiscale.scales[0]:
            said = tuple(scale[dim] / multiscale.scales[0][dim] for dim in dims.space)
            if any(abs(less * one - extent) > 2 * one for less, one, extent in zip(size, said, whole, strict=True)):
                wrong.append(f"level {number} ({' x '.join(f'{one:g}' for one in said)})")
                said = quotients
        levels.append(Level(size, dims.size(chunk), said))
    advice = f"the scale of {', '.join(wrong)} does not fit its size, which counts; correct the metadata" if wrong else ""
    return tuple(levels), advice


def spacing_in_one_unit(multiscale: Multiscale, dims: ArrayDims) -> tuple[tuple[float, ...], str]:
    """The size of a pixel of level 0 on each axis, and the unit: the file's own where the axes share it, or else um."""
    scale, units = multiscale.scales[0], [multiscale.units[dim] for dim in dims.space]
    if not scale:
        return (), ""
    spacing = tuple(scale[dim] for dim in dims.space)
    if len(set(units)) == 1:
        return spacing, SHORT_UNITS.get(units[0], units[0])
    if not set(units) <= set(METRES):
        return (), ""
    return tuple(number * METRES[unit] / METRES["micrometer"] for number, unit in zip(spacing, units, strict=True)), "um"


def _axes(image: Mapping[str, Any], attributes: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names and units of the dims.  Versions 0.1 and 0.2 have no axes: their dims are always t, c, z, y and x."""
    axes = image.get("axes")
    version = str(image.get("version") or attributes.get("version") or "")
    if not axes and version in ("0.1", "0.2"):
        axes = list("tczyx")
    if not axes:
        raise ValueError(f"the group's images (version {version or 'not given'}) have no axes; they are read for 0.1 to 0.5")
    if all(isinstance(axis, str) for axis in axes):  # version 0.3
        return tuple(axes), ("",) * len(axes)
    return tuple(str(axis["name"]) for axis in axes), tuple(str(axis.get("unit") or "") for axis in axes)


def _scale(transforms: Any, ndim: int) -> tuple[float, ...]:
    """The product of the scales among transforms; () where there is none.  Where an image begins is not asked here."""
    found: tuple[float, ...] = ()
    for transform in transforms or []:
        if transform.get("type") not in ("identity", "scale", "translation") or "path" in transform:
            raise ValueError(f"the coordinate transformation {transform} is none of 0.5; write it as a scale and a translation")
        if transform["type"] == "scale":
            scale = [float(number) for number in transform["scale"]]
            if len(scale) != ndim or not all(math.isfinite(number) and number > 0 for number in scale):
                raise ValueError(f"the scale {transform['scale']} is to be of {ndim} positive numbers; correct the metadata")
            found = tuple(a * b for a, b in zip(found or (1.0,) * ndim, scale, strict=True))
    return found


def _json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found
