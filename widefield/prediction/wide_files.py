"""The files of an image that was predicted by window, from the plain ones: labels, probabilities, an overlay, outlines.

Each is made beside its place and renamed when it is whole.  All are read and written by window; the overlay is of at most
OVERLAY_SIDE pixels a side.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.data.image import colours
from widefield.geometry.box import Box, full_box
from widefield.geometry.interval import Interval, pieces_of
from widefield.image_files import ImageFile
from widefield.image_files.band_image import STEPS, BandImage
from widefield.image_files.image_file import Array
from widefield.image_files.label_image import LabelImage, read_smaller
from widefield.image_files.opening import label_format_of
from widefield.outlines.geojson import Legend, write_outlines
from widefield.outlines.place import place_of
from widefield.outlines.tracing import traced
from widefield.prediction.labels import overlay
from widefield.prediction.raw_labels import RawLabels
from widefield.prediction.wide_source import WideSource

BAND_BYTES = 2**24
"""Of pixels that are in memory at once."""
OVERLAY_SIDE = 2048
Apart = dict[str, float]
"""`pixels` and their `share`."""


@dataclass(frozen=True)
class WideFiles:
    """Writes the files of an image.  files: by kind, as `Kinds.wide_files_of` has them.

    nothing: the label of pixels without an answer.  source: the image's pixels, on its own grid.  notes: see LabelImage.
    """

    files: Mapping[str, Path]
    image: ImageFile
    classes: tuple[str, ...]
    nothing: int
    source: WideSource
    notes: Mapping[str, str]

    def write(self, raw: RawLabels) -> Array:
        """Write all files; returns how many pixels have each number.  OSError: the disk refuses one."""
        counts = _counts(raw)
        labels = self._labels(raw, counts)
        writers: dict[str, Callable[[Path], object]] = {
            "labels": lambda path: label_format_of(self.image).write_labels(path, labels, partial(_read_as_file, raw)),
            "probabilities": partial(self._write_probabilities, raw),
            "overlay": partial(self._write_overlay, raw, labels),
            "outlines": partial(self._write_outlines, raw),
        }
        for kind, path in self.files.items():
            _whole(path, writers[kind])
        return counts

    def _labels(self, raw: RawLabels, counts: Array) -> LabelImage:
        return LabelImage(
            source=self.image.path,
            like=self.image.info,
            dtype=raw.dtype,
            classes=self.classes,
            colours=tuple(colours(len(self.classes))),
            nodata=self.nothing if counts[self.nothing] else None,
            notes={"made": "labels of the whole image, tile after tile, nothing blended", **self.notes},
        )

    def _write_probabilities(self, raw: RawLabels, path: Path) -> None:
        stored = raw.probabilities
        assert stored is not None
        is_float = stored.dtype == "float32"
        bands = BandImage(
            source=self.image.path, like=self.image.info, dtype=stored.dtype, names=self.classes,
            nodata=math.nan if is_float else STEPS + 1, scale=1.0 if is_float else 1 / STEPS,
            notes={"made": "probabilities of the whole image, tile after tile, nothing blended", **self.notes},
        )  # fmt: skip

        def read(band: int, box: Box) -> Array:
            return stored.read(box[-len(raw.size) :], band).reshape([len(one) for one in box])

        label_format_of(self.image).write_bands(path, bands, read)

    def _write_overlay(self, raw: RawLabels, labels: LabelImage, path: Path) -> None:
        step = max(0, math.ceil(math.log2(max(raw.size) / OVERLAY_SIDE)))
        height, width = (-(-extent // 2**step) for extent in raw.size)
        first = full_box(labels.size[:-2])  # of an image that its file has as a volume of one slice
        small = read_smaller(partial(_read_as_file, raw), labels, (*first, Interval(0, height), Interval(0, width)), step)
        numbers = torch.from_numpy(small.reshape(height, width).astype(np.int64))
        overlay(self._reduced(2**step), numbers, len(self.classes)).save(path, "PNG")

    def _reduced(self, factor: int) -> Tensor:
        """(C, H, W) of the image, of which each pixel is the mean of factor x factor, fewer at the far ends."""
        rows, dtype = [], self.source.dtype
        for slab in slabs_of(self.source.size, self.source.channels * 4, multiple=factor):
            pixels = self.source.read(slab)
            if factor > 1:
                mean = F.avg_pool2d(pixels.double()[None], factor, ceil_mode=True)[0]
                pixels = (mean if dtype.is_floating_point else mean.round()).to(dtype)
            rows.append(pixels)
        return torch.cat(rows, 1)

    def _write_outlines(self, raw: RawLabels, path: Path) -> None:
        count = len(self.classes)
        regions = traced(raw.read, (raw.size[0], raw.size[1]), keep=lambda numbers: numbers < count)
        legend = Legend(self.classes, tuple(colours(max(count, 2))))
        write_outlines(path, regions, legend, place_of(self.image.info))


def apart_of(raw: RawLabels, exact: RawLabels, nothing: int) -> Apart:
    """At how many pixels, of those with an answer, labels are others, and which share of them."""
    others = total = 0
    for slab in slabs_of(raw.size, np.dtype(raw.dtype).itemsize):
        one, other = raw.read(slab), exact.read(slab)
        counted = (one != nothing) | (other != nothing)
        others += int(((one != other) & counted).sum())
        total += int(counted.sum())
    return {"pixels": others, "share": others / max(1, total)}


def steps_of(likely: Array, dtype: str) -> Array:
    """Probabilities as they are stored: float32 as they are, or steps of 1 / STEPS."""
    return likely if dtype == "float32" else np.rint(likely * np.float64(STEPS)).astype(dtype)


def nothing_of(dtype: str) -> float:
    """What stands for no probability."""
    return math.nan if dtype == "float32" else STEPS + 1


def slabs_of(size: tuple[int, ...], pixel_bytes: int, *, multiple: int = 1) -> Iterator[Box]:
    """Boxes that are whole but along the first dim; there of a multiple of pixels, but for the last one."""
    step = max(1, BAND_BYTES // max(1, math.prod(size[1:]) * pixel_bytes) // multiple) * multiple
    for slab in pieces_of(Interval(0, size[0]), step):
        yield (slab, *full_box(size[1:]))


def _counts(raw: RawLabels) -> Array:
    itemsize = np.dtype(raw.dtype).itemsize
    counts = np.zeros(2 ** (8 * itemsize), dtype=np.int64)
    for slab in slabs_of(raw.size, itemsize):
        counts += np.bincount(raw.read(slab).ravel(), minlength=len(counts))
    return counts


def _read_as_file(raw: RawLabels, box: Box) -> Array:
    """Labels in a box of the axes of the file, which may have the image as a volume of one slice."""
    return raw.read(box[-len(raw.size) :]).reshape([len(one) for one in box])


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """Make a file, or a folder that is one, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.part{path.suffix}")
    _remove(beside)
    try:
        write(beside)
        _remove(path)
        os.replace(beside, path)
    except BaseException:
        _remove(beside)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
