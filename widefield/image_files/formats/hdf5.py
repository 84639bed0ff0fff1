"""HDF5: the dataset of numbers with two to four dims, or of more that are named; `file.h5#/name` picks one of several.

The names of dims are HDF5's own labels, or ilastik's `axistags`; a dataset without any follows `dims_by_extents`.  Spacing is
`element_size_um`, as ImageJ and ilastik write it, per dim of space.  Links into other files are not followed.

A chunk that was never written is the fill value to HDF5: `advice` says how many there are.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box
from widefield.image_files.image_file import Array, ImageFile, file_and_name
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.stored_array import ArrayDims, advice_on_chunks, check_numbers, dims_by_extents, dims_by_names

NAME = "HDF5"
SUFFIXES = (".h5", ".hdf5", ".he5")
EXTRA = "hdf5"
PRIORITY = 0
HAS_NAMES = True
MAGIC = b"\x89HDF\r\n\x1a\n"
MOST_SHOWN = 20
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}


def claims(path: Path, start: bytes) -> bool:
    return start.startswith(MAGIC)


def open_image(path: Path) -> ImageFile:
    return HDF5File(path, HDF5File.read_info(path))


class HDF5File(ImageFile):
    """Its handle is the dataset, and its file is open with it.  Its path has the dataset's name where one was given."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        import h5py

        dataset = _open(path)
        with dataset.file:
            dims = _dims(dataset)
            chunk = dataset.chunks or (1,) * dataset.ndim
            too_large = advice_on_chunks(math.prod(chunk) * dataset.dtype.itemsize)
            spacing = _spacing(dataset, dims)
            return ImageInfo(
                format=NAME, reader=f"h5py {h5py.__version__} (HDF5 {h5py.version.hdf5_version})", axes=dims.axes,
                channels=dims.channels(dataset.shape), dtype=dataset.dtype.newbyteorder("=").name,
                levels=one_level(dims.size(dataset.shape), dims.size(chunk)), spacing=spacing, unit="um" if spacing else "",
                compression=", ".join(_filters(dataset)), by_window=not too_large,
                advice="; ".join(one for one in (too_large, _missing_chunks(dataset)) if one),
            )  # fmt: skip

    def open_handle(self) -> Any:
        return _open(self.path)

    def close_handle(self, handle: Any) -> None:
        handle.file.close()

    def read_box(self, handle: Any, box: Box, level: int) -> Array:
        return _dims(handle).read(handle, box)


def _open(path: Path) -> Any:
    """The dataset; closing its `file` closes all.  ValueError: there is none of that name, or not exactly one."""
    import h5py

    try:
        import hdf5plugin  # noqa: F401  registers more filters, where it is installed
    except ModuleNotFoundError:
        pass
    place, name = file_and_name(path)
    file = h5py.File(place, "r", locking=False)  # locks fail on many network file systems
    try:
        dataset = _named(file, name) if name else _only(file)
        check_numbers(dataset.dtype, dataset.shape)
        _dims(dataset)
        _filters(dataset)
        if dataset.external or dataset.is_virtual:
            raise ValueError(f"the pixels of {dataset.name} lie in other files, which are not read; write them into one file")
        return dataset
    except BaseException:
        file.close()
        raise


def _only(file: Any) -> Any:
    """The only dataset that may be an image.  Links of any kind are not followed."""
    found = _images(file)
    if len(found) == 1:
        return file[found[0]]
    shown = ", ".join(found[:MOST_SHOWN]) + (" ..." if len(found) > MOST_SHOWN else "")
    if not found:
        raise ValueError("none of its datasets is of numbers and of two dims or more")
    raise ValueError(
        f"it has {len(found)} datasets that may be images: {shown}; name one, as {Path(file.filename).name}#{found[0]}"
    )


def _images(file: Any) -> list[str]:
    """The names of the datasets of numbers with two dims or more."""
    import h5py

    found: list[str] = []

    def visit(name: str, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset) and thing.dtype.kind in "biuf" and len(thing.shape or ()) >= 2:
            found.append(f"/{name}")

    file.visititems(visit)
    return found


def _named(file: Any, name: str) -> Any:
    import h5py

    group, links = file, [one for one in name.split("/") if one]
    for link in links:
        kind = group.get(link, getlink=True) if isinstance(group, h5py.Group) else None
        if kind is None:
            raise ValueError(f"it has no {name}; it has {', '.join(_images(file)[:MOST_SHOWN]) or 'no dataset of numbers'}")
        if isinstance(kind, h5py.ExternalLink):
            raise ValueError(f"{name} is a link to {kind.filename}, which is not followed; open that file")
        group = group[link]
    if not isinstance(group, h5py.Dataset) or group.file.filename != file.filename:
        raise ValueError(f"{name} is no dataset of this file; it has {', '.join(_images(file)[:MOST_SHOWN])}")
    return group


def _dims(dataset: Any) -> ArrayDims:
    labels = dataset.attrs.get("DIMENSION_LABELS", ())  # h5py's `dims` crashes on a damaged file
    names = [label.decode() if isinstance(label, bytes) else str(label) for label in labels]
    if not all(names) or not names:
        names = [str(axis["key"]) for axis in json.loads(dataset.attrs.get("axistags", '{"axes": []}'))["axes"]]
    known = all(name.lower() in tuple("tczyx") for name in names)
    return dims_by_names(names, dataset.shape) if names and known else dims_by_extents(dataset.shape)


def _spacing(dataset: Any, dims: ArrayDims) -> tuple[float, ...]:
    """In um, from (z, y, x); () where the file does not say it."""
    said = np.atleast_1d(dataset.attrs.get("element_size_um", ()))
    if said.shape != (3,) or said.dtype.kind not in "iuf" or not (np.isfinite(said) & (said > 0)).all():
        return ()
    return tuple(float(number) for number in said[-len(dims.axes) :])


def _filters(dataset: Any) -> list[str]:
    """The names of what its chunks went through.  ValueError: this installation lacks one."""
    import h5py

    found, plan = [], dataset.id.get_create_plist()
    for number in range(plan.get_nfilters()):
        code, _, _, said = plan.get_filter(number)
        name = FILTERS.get(code) or said.decode(errors="replace") or str(code)
        if not h5py.h5z.filter_avail(code):
            raise ValueError(
                f"{dataset.name} is compressed by {name} (filter {code}), which is missing here; pip install hdf5plugin"
            )
        found.append(name)
    return found


def _missing_chunks(dataset: Any) -> str:
    """A sentence on the chunks that were never written; "" where all were."""
    total = 1
    found = int(dataset.id.get_storage_size() > 0)
    if dataset.chunks:
        total = math.prod(-(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        found = dataset.id.get_num_chunks()
    if found >= total:
        return ""
    return f"{total - found} of {total} chunks were never written and read as {dataset.fillvalue}"


# ---------------------------------------------------------------------------------------------- examples


def write_example(path: Path, pixels: Array) -> None:
    """The words in the file's name say how: gzip, lzf, big, whole (not in chunks), labels, two (with another dataset)."""
    import h5py

    words = path.name.split(".")[0].split("-")
    options: dict[str, Any] = {} if "whole" in words else {"chunks": (1, *(8,) * (pixels.ndim - 1))}
    if "gzip" in words:
        options.update(compression="gzip", shuffle=True, fletcher32=True)
    if "lzf" in words:
        options["compression"] = "lzf"
    stored = np.moveaxis(pixels, 0, -1) if "labels" in words else pixels
    if "labels" in words:
        options["chunks"] = None
    stored = stored.astype(stored.dtype.newbyteorder(">")) if "big" in words else stored
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("raw/image", data=stored, **options)
        file.create_dataset("raw/times", data=np.arange(5))
        if "labels" in words:
            for dimension, name in zip(dataset.dims, ("yxc", "zyxc")[pixels.ndim - 3], strict=True):
                dimension.label = name


CASES = [
    ("chunks.h5", (3, 37, 50), "uint8"),
    ("gzip.h5", (2, 9, 21, 30), "int16"),
    ("lzf-big.h5", (1, 9, 21, 30), "float32"),
    ("whole-big.h5", (3, 37, 50), "uint16"),
    ("labels.h5", (5, 7, 12, 11), "float64"),
    ("bool.hdf5", (1, 37, 50), "bool"),
]
"""A file's name, the (C, *axes) that `write_example` gets, and their dtype."""
