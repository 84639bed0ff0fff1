"""Which page of a TIFF, and which block of it, has which pixel; and how a box is read of them, block by block.

A series is what tifffile calls the pages that make one image at one resolution.  A page is (separate, Z, Y, X, together):
channels in planes of their own, or pixel by pixel.  Its blocks are tiles, or strips, which are as wide as the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from widefield.geometry.box import Box, meet, size_of, within
from widefield.geometry.interval import Interval
from widefield.image_files.block_sizes import require_plausible
from widefield.image_files.codestreams import check_lzw, require_small
from widefield.image_files.last_decoded import OpenBlocks, last_decoded
from widefield.image_files.stored_array import MOST_CHANNELS
from widefield.image_files.tags import check_blocks, check_raw_blocks

Array = np.ndarray[Any, Any]

CHANNELS, UNNAMED = "CSE", "IQ"
"""Dims by tifffile's letters.  Pages that nobody has named are channels or depth by their number, as in a .npy file."""
_NAMES = {"T": "points in time", "P": "positions or phases", "R": "positions", "M": "mosaic tiles", "V": "views", "A": "angles",
          "H": "lifetimes", "L": "exposures"}  # fmt: skip
LZW, JPEGS = 5, (6, 7, 33007, 34892)
"""Numbers of compressions, as in tag 259."""
READ_BYTES = 2**22
"""Of pixels without compression, at once; what is read and not yet sorted into channels is memory beside the window."""


@dataclass(frozen=True)
class PageOrder:
    """How pages make an image of (C, Z, Y, X).

    counted: the dims that pages are counted along, the last one fastest: C or Z, and its extent.
    channels, depth: of one page.
    """

    counted: tuple[tuple[str, int], ...]
    channels: int
    depth: int

    @property
    def all_channels(self) -> int:
        return self.channels * math.prod(extent for dim, extent in self.counted if dim == "C")

    @property
    def all_depth(self) -> int:
        return self.depth * math.prod(extent for dim, extent in self.counted if dim == "Z")

    @property
    def axes(self) -> str:
        return "ZYX" if self.all_depth > 1 else "YX"

    def places(self) -> Iterator[tuple[int, int, int]]:
        """For each page its number, its first channel and its first Z."""
        for number, at in enumerate(itertools.product(*(range(extent) for _, extent in self.counted))):
            first = {"C": 0, "Z": 0}
            for (dim, extent), index in zip(self.counted, at, strict=True):
                first[dim] = first[dim] * extent + index
            yield number, first["C"] * self.channels, first["Z"] * self.depth


def page_order(series: Any) -> PageOrder:
    """ValueError: its pages are counted along something that one image has not, as time."""
    page = series.keyframe
    dims, inner = _dims(series.axes, series.shape), _dims(page.axes, page.shape)
    outer = dims[: len(dims) - len(inner)]
    if [extent for _, extent in dims[len(outer) :]] != [extent for _, extent in inner]:
        raise ValueError(f"it claims {series.shape} pixels ({series.axes}) in pages of {page.shape} ({page.axes})")
    separate, depth, _, _, together = page.shaped
    counted = tuple((_meaning(letter, extent, outer, separate * together), extent) for letter, extent in outer)
    if depth > 1 and any(dim == "Z" for dim, _ in counted):
        raise ValueError(f"it has pages of depth {depth}, which are themselves counted along depth; save (C, Z, Y, X)")
    return PageOrder(counted, channels=separate * together, depth=depth)


def _dims(axes: str, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    return [(letter, int(extent)) for letter, extent in zip(axes, shape, strict=True) if extent != 1 or letter in "YX"]


def _meaning(letter: str, extent: int, outer: list[tuple[str, int]], channels: int) -> str:
    """C or Z, of a dim that pages are counted along."""
    if letter in CHANNELS:
        return "C"
    if letter == "Z":
        return "Z"
    if letter not in UNNAMED:
        what = _NAMES.get(letter, f"steps of the axis {letter}")
        raise ValueError(f"it holds {extent} {what} ({letter}), and an image has one; save each as a file of its own")
    if len(outer) > 1 or channels > 1:
        raise ValueError(
            f"it has {extent} pages of {channels} channels that are not named; save it with metadata={{'axes': 'ZYX'}} or "
            "'CYX', or each page as a file of its own"
        )
    return "C" if extent <= MOST_CHANNELS else "Z"


@dataclass(frozen=True)
class Blocks:
    """The grid of a page's blocks.  shape: (separate, Z, Y, X, together).  block: (Z, Y, X)."""

    shape: tuple[int, int, int, int, int]
    block: tuple[int, int, int]

    @property
    def count(self) -> int:
        return self.shape[0] * math.prod(self._counts)

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(-(-extent // block) for extent, block in zip(self.shape[1:4], self.block, strict=True))

    def touched_by(self, box: Box) -> Iterator[tuple[int, int, Box]]:
        """For each block that has pixels of a box (Z, Y, X): its number, its separate channel and its box."""
        ranges = [range(run.start // block, -(-run.stop // block)) for run, block in zip(box, self.block, strict=True)]
        deep, down, across = self._counts
        for plane, z, y, x in itertools.product(range(self.shape[0]), *ranges):
            starts = (z * self.block[0], y * self.block[1], x * self.block[2])
            ends = (
                min(start + block, extent) for start, block, extent in zip(starts, self.block, self.shape[1:4], strict=True)
            )
            number = ((plane * deep + z) * down + y) * across + x
            yield number, plane, tuple(Interval(start, end) for start, end in zip(starts, ends, strict=True))


def blocks_of(page: Any) -> Blocks:
    """ValueError: a header without pixels, or with blocks of none."""
    height, width = page.shaped[2:4]
    block = (page.tiledepth, page.tilelength, page.tilewidth) if page.is_tiled else (1, min(page.rowsperstrip, height), width)
    if min(*page.shaped, *block) < 1:
        raise ValueError(f"it has {page.shaped} pixels in blocks of {block}; there is no image in it")
    volumes, planes, rows, columns, samples = map(int, page.shaped)
    deep, down, across = map(int, block)
    return Blocks((volumes, planes, rows, columns, samples), (deep, down, across))


def is_raw(page: Any) -> bool:
    """Whether any pixel of a page's strips can be read without the others."""
    plain = page.compression == 1 and page.predictor == 1 and page.fillorder == 1 and not page.is_subsampled
    return bool(plain and not page.is_tiled and page.dtype.kind in "iuf" and page.bitspersample == 8 * page.dtype.itemsize)


@dataclass
class PageReader:
    """Reads boxes of a series.  fill: of the pixels of empty blocks."""

    series: Any
    fill: int = 0
    owner: OpenBlocks = field(default_factory=OpenBlocks)
    order: PageOrder = field(init=False)
    blocks: Blocks = field(init=False)
    raw: bool = field(init=False)

    def __post_init__(self) -> None:
        page = self.series.keyframe
        self.order, self.blocks, self.raw = page_order(self.series), blocks_of(page), is_raw(page)

    def check(self) -> None:
        """ValueError: a page is missing, or its blocks are not all in the file."""
        planned = math.prod(extent for _, extent in self.order.counted)
        if self.series.is_truncated and planned > 1:
            return self._check_contiguous(planned)
        pages = list(self.series)
        missing = planned - len(pages) + sum(page is None for page in pages)
        if missing:
            raise ValueError(f"{missing} of its {planned} pages are in no file that is there")
        for page in pages:
            wanted = self.blocks.count
            check_blocks(page.dataoffsets, page.databytecounts, wanted=wanted, file_bytes=page.parent.filehandle.size)
            self._check_raw(page.databytecounts[:wanted])
        return None

    def _check_raw(self, counts: Any) -> None:
        page, (deep, rows, columns) = self.series.keyframe, self.blocks.block
        if page.compression != 1 or page.is_subsampled or not isinstance(page.bitspersample, int):
            return
        height, together = self.blocks.shape[2], self.blocks.shape[4]
        last = rows if page.is_tiled else (height - 1) % rows + 1  # a last strip has the rows that are left
        row_bytes = deep * -(-columns * together * page.bitspersample // 8)
        check_raw_blocks(counts, row_bytes=row_bytes, rows=rows, last=last, down=-(-height // rows))

    def _check_contiguous(self, planned: int) -> None:
        page = self.series.keyframe
        end = int(page.dataoffsets[0]) + planned * self._page_bytes
        if not self.raw or not page.is_contiguous or end > page.parent.filehandle.size:
            raise ValueError(f"its {planned} planes would end at byte {end}, and the file has {page.parent.filehandle.size}")

    @property
    def _page_bytes(self) -> int:
        return math.prod(self.blocks.shape) * self.series.keyframe.dtype.itemsize

    def read(self, box: Box) -> Array:
        """(C, Z, Y, X) of a box (Z, Y, X)."""
        depth, *rest = box
        pixels = np.empty((self.order.all_channels, *size_of(box)), dtype=self.series.keyframe.dtype)
        for number, channel, first in self.order.places():
            inside = Interval(max(depth.start, first), min(depth.stop, first + self.order.depth))
            if len(inside):
                target = pixels[channel : channel + self.order.channels, inside.start - depth.start : inside.stop - depth.start]
                self._read_page(number, (Interval(inside.start - first, inside.stop - first), *rest), target)
        return pixels

    def filled(self, box: Box) -> Array | None:
        """bool (Z, Y, X): which pixels are in no empty block.  None: the box has no empty block."""
        depth, *rest = box
        found = np.ones(size_of(box), dtype=bool)
        for number, _, first in self.order.places():
            inside = Interval(max(depth.start, first), min(depth.stop, first + self.order.depth))
            if self.raw or not len(inside):
                continue
            part, page = (Interval(inside.start - first, inside.stop - first), *rest), self.series[number]
            for block, _, around in self.blocks.touched_by(part):
                if not int(page.databytecounts[block]):
                    found[inside.start - depth.start :][within(part, meet(part, around))] = False
        return None if found.all() else found

    def _read_page(self, number: int, box: Box, target: Array) -> None:
        """target: (channels of a page, Z, Y, X)."""
        virtual = self.series.is_truncated and number > 0  # planes that follow the first one, without a page of their own
        page = self.series[0 if virtual else number]
        together = self.blocks.shape[4]
        for block, plane, around in self.blocks.touched_by(box):
            part = meet(box, around)
            piece = target[plane * together : (plane + 1) * together, *within(box, part)]
            if self.raw:
                self._read_rows(page, block, piece, tuple(part), around, skip=number * self._page_bytes if virtual else 0)
                continue
            decoded = self._block(page, block, size_of(around))
            piece[...] = self.fill if decoded is None else np.moveaxis(decoded[within(around, part)], -1, 0)

    def _block(self, page: Any, number: int, size: tuple[int, ...]) -> Array | None:
        """(Z, Y, X, together), at least of `size`.  None: it is empty."""
        offset, count = int(page.dataoffsets[number]), int(page.databytecounts[number])
        if not count or not offset:
            return None
        frame = page.keyframe
        place = (page.parent.filehandle.name, offset)
        decoded = last_decoded(self.owner, place, lambda: self._decoded(page, number, offset, count))
        if decoded.dtype != frame.dtype or decoded.ndim != 4 or any(a < b for a, b in zip(decoded.shape, size, strict=False)):
            raise ValueError(f"block {number} has {decoded.shape} pixels of {decoded.dtype}, and the header says {size}")
        return decoded

    def _decoded(self, page: Any, number: int, offset: int, count: int) -> Array:
        frame = page.keyframe
        require_plausible(math.prod(self.blocks.block) * self.blocks.shape[4] * frame.dtype.itemsize, count)
        data = bytes_at(page, offset, count)
        require_small(data, pixels=math.prod(self.blocks.block))
        if frame.compression == LZW and frame.fillorder == 1:
            check_lzw(data)
        tables = {"jpegtables": page.jpegtables, "jpegheader": frame.jpegheader} if frame.compression in JPEGS else {}
        return frame.decode(data, number, **tables)[0]

    def _read_rows(self, page: Any, number: int, target: Array, part: Box, strip: Box, *, skip: int) -> None:
        """target: (together, 1, rows, columns), the pixels of `part`, which lies in a strip without compression."""
        if not int(page.databytecounts[number]):
            target[...] = self.fill
            return
        _, rows, columns = part
        dtype = self.series.keyframe.dtype.newbyteorder(page.parent.byteorder)
        pixel = self.blocks.shape[4] * dtype.itemsize
        row = self.blocks.shape[3] * pixel
        at = int(page.dataoffsets[number]) + skip + (rows.start - strip[1].start) * row + columns.start * pixel
        whole_rows = len(columns) == self.blocks.shape[3]
        step = max(1, READ_BYTES // row) if whole_rows else 1
        for first in range(0, len(rows), step):
            here = min(step, len(rows) - first)
            data = bytes_at(page, at + first * row, here * len(columns) * pixel)
            found = np.frombuffer(data, dtype).reshape(here, len(columns), -1)
            target[:, 0, first : first + here] = np.moveaxis(found, -1, 0)


def bytes_at(page: Any, offset: int, count: int) -> bytes:
    """ValueError: the file ends before."""
    file = page.parent.filehandle
    if file.closed:  # one of several files of an OME-TIFF, which tifffile opens when they are read
        file.open()
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        raise ValueError(f"{len(data)} of {count} bytes are there at byte {offset}: the file is cut short")
    return data
