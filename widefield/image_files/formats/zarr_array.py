"""Zarr 2 and 3, and OME-Zarr 0.1 to 0.5: an array, or a group whose metadata names the arrays of an image's levels.

The names of dims come from the metadata of OME-Zarr, from Zarr 3's `dimension_names` or from xarray's `_ARRAY_DIMENSIONS`; an
array without any follows `dims_by_extents`.  t must have one pixel; z of one pixel is left out.

A chunk without a file is the fill value to Zarr, be it that all of it had that value or that the file was lost: `advice` says
how many there are at full resolution.  It is an error where it cannot be meant: where the fill value is null, and where no
chunk is found because their names have the other separator.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widefield.geometry.box import Box
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.ome_zarr import (
    METADATA,
    Multiscale,
    attributes_of,
    is_array,
    is_version_3,
    levels_of,
    multiscale_of,
    spacing_in_one_unit,
)
from widefield.image_files.stored_array import ArrayDims, advice_on_chunks, check_numbers, dims_by_extents, dims_by_names

NAME = "Zarr"
SUFFIXES = (".zarr",)
EXTRA = "zarr"
PRIORITY = 0
MOST_COUNTED = 100_000
"""Chunks; of more, nobody counts which are missing, for it needs a look at every file."""


def claims(path: Path, start: bytes) -> bool:
    return path.is_dir() and (path.name.lower().endswith(SUFFIXES) or any((path / name).is_file() for name in METADATA))


def open_image(path: Path) -> ImageFile:
    return ZarrFile(path, ZarrFile.read_info(path))


@dataclass(frozen=True)
class StoredLevels:
    """folders, arrays: of the levels, the full resolution first.  multiscale: None for an array that is no OME-Zarr."""

    folders: tuple[Path, ...]
    arrays: tuple[Any, ...]
    dims: ArrayDims
    multiscale: Multiscale | None


class ZarrFile(ImageFile):
    """Its handle is the arrays of all levels.  Zarr has threads of its own, of which a process gets two here."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        import zarr

        stored = _open_levels(path)
        array, dims = stored.arrays[0], stored.dims
        shapes, chunks = [one.shape for one in stored.arrays], [one.chunks for one in stored.arrays]
        levels, wrong_scale = one_level(dims.size(shapes[0]), dims.size(chunks[0])), ""
        spacing: tuple[float, ...] = ()
        names: tuple[str, ...] = ()
        unit = ""
        if stored.multiscale is not None:
            levels, wrong_scale = levels_of(stored.multiscale, dims, shapes, chunks)
            spacing, unit = spacing_in_one_unit(stored.multiscale, dims)
            names = stored.multiscale.channel_names
        channels = dims.channels(array.shape)
        too_large = advice_on_chunks(math.prod(array.chunks) * array.dtype.itemsize)
        advice = [too_large, wrong_scale, _missing_chunks(array, stored.folders[0])]
        return ImageInfo(
            format="OME-Zarr" if stored.multiscale else f"Zarr {array.metadata.zarr_format}",
            reader=f"zarr {zarr.__version__}",
            axes=dims.axes,
            channels=channels,
            dtype=array.dtype.newbyteorder("=").name,
            levels=levels,
            channel_names=names if len(names) == channels and any(names) else (),
            spacing=spacing,
            unit=unit,
            compression=", ".join(_codec_name(codec) for codec in array.compressors),
            by_window=not too_large,
            advice="; ".join(one for one in advice if one),
        )

    def open_handle(self) -> StoredLevels:
        return _open_levels(self.path)

    def close_handle(self, handle: StoredLevels) -> None:
        """Nothing stays open: a chunk is a file, which is opened for each read."""

    def read_box(self, handle: StoredLevels, box: Box, level: int) -> Array:
        array = handle.arrays[level]
        if array.metadata.fill_value is None:  # Zarr 2's null: a chunk without a file has no values
            for key in _keys_of(array, handle.dims.slices(array.ndim, box)):
                if not (handle.folders[level] / key).is_file():
                    raise ValueError(f"its chunk {key} has no file, and no fill value stands for it; copy it again")
        return handle.dims.read(array, box)


def _open_levels(path: Path) -> StoredLevels:
    import zarr

    zarr.config.set({"async.concurrency": 4, "threading.max_workers": 2})  # else a thread per core, in every process
    multiscale, folders = _image_in(path)
    arrays = [zarr.open_array(str(one), mode="r", zarr_format=3 if is_version_3(one) else 2) for one in folders]
    for array in arrays:
        check_numbers(array.dtype, array.shape)
    dims = _dims(arrays[0], multiscale)
    for folder, array in zip(folders, arrays, strict=True):
        like_first = array.ndim == arrays[0].ndim and array.dtype == arrays[0].dtype
        if not like_first or dims.channels(array.shape) != dims.channels(arrays[0].shape):
            raise ValueError(
                f"its level {folder.name} has {array.dtype} of shape {array.shape}, the first {arrays[0].dtype} of shape "
                f"{arrays[0].shape}; levels are to have the same dtype and channels"
            )
    return StoredLevels(tuple(folders), tuple(arrays), dims, multiscale)


def _dims(array: Any, multiscale: Multiscale | None) -> ArrayDims:
    if multiscale is not None:
        return dims_by_names(multiscale.names, array.shape)
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    known = all(isinstance(name, str) and name.lower() in tuple("tczyx") for name in names)
    return dims_by_names(names, array.shape) if names and known else dims_by_extents(array.shape)


def _image_in(path: Path) -> tuple[Multiscale | None, list[Path]]:
    """The folders of an image's levels; of a group that is none, of its only array or image.

    ValueError: there are several, or none; the members are named.
    """
    if not any((path / name).is_file() for name in METADATA):
        raise ValueError(f"it has none of {', '.join(METADATA)}; was the folder copied as a whole?")
    if is_array(path):
        return None, [path]
    multiscale = multiscale_of(attributes_of(path))
    if multiscale is not None:
        return multiscale, [path / name for name in multiscale.paths]
    members = [one for one in sorted(path.iterdir()) if any((one / name).is_file() for name in METADATA)]
    images = [one for one in members if is_array(one) or attributes_of(one).get("multiscales")]
    if len(images) == 1:
        return _image_in(images[0])
    shown = ", ".join(one.name for one in members[:20]) or "none"
    raise ValueError(f"it is a group of {len(images)} images, and not of one; open one of its members: {shown}")


def _codec_name(codec: Any) -> str:
    """As the array's metadata name it, of Zarr 2 and 3."""
    said = codec.to_dict() if hasattr(codec, "to_dict") else codec.get_config()
    return str(said.get("name") or said.get("id"))


# ---------------------------------------------------------------------------------------------- chunks


def _keys_of(array: Any, index: tuple[slice, ...]) -> Iterator[str]:
    """The names of the chunks that a part of the array lies in; stops are within the array, or None."""
    ranges = [
        range((one.start or 0) // chunk, -(-(extent if one.stop is None else one.stop) // chunk))
        for one, chunk, extent in zip(index, array.chunks, array.shape, strict=True)
    ]
    return (array.metadata.encode_chunk_key(place) for place in itertools.product(*ranges))


def _missing_chunks(array: Any, folder: Path) -> str:
    """A sentence on the chunks, or shards, that have no file; "" where all do, or where they are too many to count.

    ValueError: none is found, but files of other names are.
    """
    extents = array.shards or array.chunks
    total = math.prod(-(-extent // chunk) for extent, chunk in zip(array.shape, extents, strict=True))
    if total > MOST_COUNTED:
        return ""
    key = array.metadata.encode_chunk_key((0,) * array.ndim)
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(key)))
    names = [name for name in itertools.islice(_files_in(folder), 2 * MOST_COUNTED) if Path(name).name not in METADATA]
    found = sum(1 for name in names if pattern.fullmatch(name))
    others = [name for name in names if re.fullmatch(r"(c[./])?\d+([./]\d+)*", name)]
    if others and not found:
        raise ValueError(
            f"its {total} chunks are to be named like {key}, but the files are named like {others[0]}, so that all of it would "
            f"read as {array.metadata.fill_value}; correct the separator in the metadata of {folder}"
        )
    if found >= total:
        return ""
    what = "shards" if array.shards else "chunks"
    return (
        f"{total - found} of {total} {what} at full resolution have no file and read as {array.metadata.fill_value}; where "
        "that is not meant, copy the folder again"
    )


def _files_in(folder: Path) -> Iterator[str]:
    """The files below a folder, as paths from it."""
    for place, _, names in os.walk(folder):
        inner = Path(place).relative_to(folder).as_posix()
        yield from names if inner == "." else (f"{inner}/{name}" for name in names)


# ---------------------------------------------------------------------------------------------- examples


def write_example(path: Path, pixels: Array) -> None:
    """The words in the file's name say how: v2 or v3, the codec, the order of bytes and dims; ome4 and ome5 have two levels."""
    words = path.name.split(".")[0].split("-")
    if words[0] in ("ome4", "ome5"):
        _write_ome(path, pixels, 2 if words[0] == "ome4" else 3)
        return
    options: dict[str, Any] = {"chunks": (1, *(8,) * (pixels.ndim - 1)), "fill_value": 7}
    if "sharded" in words:
        options["shards"] = (2, *(16,) * (pixels.ndim - 1))
    if "raw" in words:
        options["compressors"] = None
    if "null" in words:
        options["fill_value"] = None
    if "gzip" in words:
        options["compressors"] = _gzip("v2" in words)
    stored = pixels.astype(pixels.dtype.newbyteorder(">")) if "big" in words else pixels
    if "fortran" in words:
        options["order"] = "F"
    _write(path, stored, 2 if "v2" in words else 3, **options)


def _gzip(version_2: bool) -> Any:
    if version_2:
        import numcodecs

        return numcodecs.GZip()
    from zarr.codecs import GzipCodec

    return GzipCodec()


def _write(path: Path, pixels: Array, version: int, **options: Any) -> None:
    import zarr

    array = zarr.create_array(
        str(path), shape=pixels.shape, dtype=pixels.dtype, zarr_format=3 if version == 3 else 2, **options
    )
    array[...] = pixels


def _write_ome(path: Path, pixels: Array, version: int) -> None:
    """Dims t, z, c, y and x, which are not in the order of the result, where there is a z; else x, c and y."""
    names = "tzcyx" if pixels.ndim == 4 else "xcy"
    stored = pixels.transpose(1, 0, 2, 3)[None] if pixels.ndim == 4 else pixels.transpose(2, 0, 1)
    half = stored[tuple(slice(None, None, 2) if name in "yx" else slice(None) for name in names)]
    kinds = {"t": "time", "c": "channel"}
    axes = [{"name": name, "type": kinds.get(name, "space"), "unit": "micrometer"} for name in names]
    datasets = [
        {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": _example_scale(names, factor)}]}
        for level, factor in enumerate((1, 2))
    ]
    ome: dict[str, Any] = {"multiscales": [{"version": "0.4", "axes": axes, "datasets": datasets}]}
    ome["omero"] = {"channels": [{"label": f"stain {number}"} for number in range(len(pixels))]}
    for level, part in enumerate((stored, half)):
        _write(path / str(level), part, version, chunks=tuple(8 if name in "yx" else 1 for name in names))
    if version == 2:
        (path / ".zgroup").write_text('{"zarr_format": 2}', encoding="utf-8")
        (path / ".zattrs").write_text(json.dumps(ome), encoding="utf-8")
    else:
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": {"version": "0.5", **ome}}}
        (path / "zarr.json").write_text(json.dumps(group), encoding="utf-8")


def _example_scale(names: str, factor: int) -> list[float]:
    return [0.5 * factor if name in "yx" else 2.0 for name in names]


CASES = [
    ("v3.zarr", (3, 37, 50), "uint8"),
    ("v3-raw-big.zarr", (1, 37, 50), "uint16"),
    ("v3-gzip.zarr", (2, 9, 21, 30), "int16"),
    ("v3-sharded.zarr", (2, 37, 50), "float32"),
    ("v2.zarr", (3, 37, 50), "float64"),
    ("v2-raw-null.zarr", (1, 37, 50), "uint8"),
    ("v2-gzip-big-fortran.zarr", (3, 37, 50), "int32"),
    ("ome4.ome.zarr", (2, 5, 37, 50), "uint16"),
    ("ome5.ome.zarr", (3, 37, 50), "uint8"),
]
"""A file's name, the (C, *axes) that `write_example` gets, and their dtype."""
