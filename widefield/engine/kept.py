"""Where does a whole tensor lie that tiles in time write and read, box by box?

A `Kept` lies on the device, in the CPU's memory, or in a file that has no name and ends with it.  Boxes are in pixels of the
whole, an Interval per dim.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.box import Box, holds, is_empty, size_of, within
from widefield.geometry.interval import Interval
from widefield.naming import did_you_mean

CPU = torch.device("cpu")
PLACES = ("device", "host", "file")
SLAB_BYTES = 16 << 20
"""How far a copy from or to the CPU's memory reaches at once, and so how much of a file is resident at most."""

BAND = 128
"""Columns that lie together in a file: rows of so many pixels, of all channels, then the next row."""

_DROP: int | None = getattr(mmap, "MADV_DONTNEED", None)
"""Advice to take pages out of what this process holds; the system keeps them while it has memory to spare."""
_POPULATE_WRITE: int | None = 23 if sys.platform == "linux" else None
"""Advice to make pages ready to be written to, all at once (Linux 5.14).  One by one, as each is first touched, costs 8 times
what the copy does: 512 MiB into a new file on ext4 took 1.4 to 1.7 s, and 0.2 s so."""

Arrival = tuple[Box, Tensor, torch.cuda.Event | None, bool]


@dataclass
class Room:
    """Bytes of the device that kept tensors may take together, before the next goes where it was to go."""

    bytes: int = 0

    def take(self, size: int) -> bool:
        """Whether so many bytes fit; then they are taken, until they are given back by adding them."""
        fits = size <= self.bytes
        self.bytes -= size if fits else 0
        return fits


class Kept:
    """One whole tensor that is written and read by boxes; zeros where nothing was written.

    shape, dtype, device: the whole's, as a program that holds it all would have it.
    place: "device": a tensor there.  "host": the CPU's memory; copies pass through pinned memory on streams of their own, so
        that a GPU computes meanwhile.  "file": a file in `folder`, else in the system's folder for such (often /tmp; where
        that is memory itself, name another).  It has no name, so nothing stays behind after a crash.
    room: as long as there is some, the whole lies on the device all the same.
    order: the dims from outermost to innermost in memory, as `torch.empty_permuted` takes them; None: as they are.
    Memory is taken at the first write or add, so that what is freed by then can be used again.
    Errors: ValueError for an unknown place; OSError at the first write or add where the file does not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        place: str = "device",
        order: Sequence[int] | None = None,
        folder: str | Path | None = None,
        room: Room | None = None,
    ) -> None:
        if place not in PLACES:
            hint = did_you_mean(str(place), PLACES)
            raise ValueError(f"there is no place {place!r} to keep tensors in{hint} There are: {', '.join(PLACES)}.")
        self.shape, self.dtype, self.device, self.place = torch.Size(shape), dtype, torch.device(device), place
        self.order = tuple(range(len(self.shape)) if order is None else order)
        self._is_here = place == "device" or (place == "host" and self.device.type == "cpu")
        self._room, self._taken = room, 0
        self._folder = str(folder or tempfile.gettempdir())
        self._memory: Tensor | None = None
        self._file: mmap.mmap | None = None
        self._band = 1
        self._arriving: Arrival | None = None
        self._is_freed = False

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        """A tensor that exists already, without a copy: what is written to it is written to the tensor."""
        order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
        kept = cls(tensor.shape, tensor.dtype, tensor.device, order=order)
        kept._memory = tensor.detach()
        return kept

    @property
    def bytes(self) -> int:
        """Of the whole, whether it is there yet or not."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held: nothing was written yet, or it was freed."""
        return self._memory is None

    def write(self, box: Box, tile: Tensor) -> None:
        """Put a tile in its place.  AssertionError: it has another size or dtype than the box and the whole."""
        self._put(box, tile, adds=False)

    def add(self, box: Box, tile: Tensor) -> None:
        """Add a tile to what is in its place, to zeros where nothing is.  AssertionError as for `write`."""
        self._put(box, tile, adds=True)

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, on the device, in the whole's order of memory; never to be written to.

        A view where the whole lies on the device, else a copy, which on a GPU is made beside what it computes.
        """
        self._check(box)
        if is_empty(box) or self._memory is None:
            return _empty(size_of(box), self.dtype, self.device, self.order).zero_()
        self._settle()
        return self._memory[self._slices(box)] if self._is_here else self._brought(box)

    def whole(self) -> Tensor:
        """All pixels, as `read` gives them; on the device the tensor itself and no view of it."""
        return self._memory if self._is_here and self._memory is not None else self.read(all_of(self.shape))

    def free(self) -> None:
        """Give memory or disk back now.  Nothing can be written or read afterwards; freeing again does nothing."""
        self._arriving = self._memory = self._file = None  # nothing else leads to the file, so its space on the disk goes too
        if self._room is not None:
            self._room.bytes += self._taken
        self._taken = 0
        self._is_freed = True

    # ------------------------------------------------------------------------------------------ from and to the device

    def _put(self, box: Box, tile: Tensor, *, adds: bool) -> None:
        self._check(box)
        assert tuple(tile.shape) == size_of(box), (
            f"a tile of {tuple(tile.shape)} px for the box {shown(box)} of {size_of(box)} px"
        )
        assert tile.dtype == self.dtype, f"a tile of {tile.dtype} for a whole of {self.dtype}"
        if is_empty(box):
            return
        if self._memory is None:
            self._memory = self._made()
        self._settle()
        self._arriving = (box, *self._sent(tile.detach()), adds)
        if self._arriving[2] is None:
            self._settle()

    def _settle(self) -> None:
        """Put the tile that is on its way in its place; on a GPU that is done at the next call, so that it has time."""
        if self._arriving is None or self._memory is None:
            return
        (box, tile, done, adds), self._arriving = self._arriving, None
        if done is not None:
            done.synchronize()
        for part in self._parts(box):
            place, pixels = self._place(part), tile[within(box, part)]
            self._advise(place, _POPULATE_WRITE)
            place.add_(pixels) if adds else place.copy_(pixels)
            self._advise(place, _DROP)

    def _sent(self, tile: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The tile where the whole lies, and what to wait for before it is read."""
        if self._is_here:
            return tile, None
        lane = lane_to(self.device, "down")
        return (tile.cpu(), None) if lane is None else _lowered(tile, lane, self.device, self.order)

    def _brought(self, box: Box) -> Tensor:
        """A copy on the device of a box of a whole that lies elsewhere."""
        assert self._memory is not None
        lane = lane_to(self.device, "up")
        with beside(lane):
            there = _empty(size_of(box), self.dtype, self.device, self.order)
            for part in self._parts(box):
                place = self._place(part)
                there[within(box, part)].copy_(place if lane is None else raised(place, self.device, self.order))
                self._advise(place, _DROP)
        return awaited(there, lane)

    # ------------------------------------------------------------------------------------------ memory

    def _made(self) -> Tensor:
        if not self._is_here and self._room is not None and self._room.take(self.bytes):
            self._is_here, self._taken = True, self.bytes
            return _empty(self.shape, self.dtype, self.device, self.order).zero_()
        if self.place != "file" or not self.bytes:
            return _empty(self.shape, self.dtype, self.device if self._is_here else CPU, self.order).zero_()
        self._band = _band_of(self.shape, self.order)
        bands, shape = -(-self.shape[-1] // self._band) if self.shape else 1, (*self.shape[:-1], self._band)[: len(self.shape)]
        self._file = _file_of(bands * math.prod(shape) * self.dtype.itemsize, self._folder)
        strides = _empty(shape, self.dtype, torch.device("meta"), _file_order(self.order)).stride()
        return torch.frombuffer(self._file, dtype=self.dtype).as_strided((bands, *shape), (math.prod(shape), *strides))

    def _parts(self, box: Box) -> Iterator[Box]:
        """The box in parts that lie near together in memory, each in one band."""
        assert self._memory is not None
        if self._is_here:
            return iter([box])
        most = SLAB_BYTES // self.dtype.itemsize
        if self._file is None:
            return _slabs(box, self._memory.stride(), most)
        in_bands = [(*box[:-1], columns) for columns in _in_bands(box[-1], self._band)] if box else [box]
        return itertools.chain.from_iterable(_slabs(part, self._memory.stride()[1:], most) for part in in_bands)

    def _place(self, part: Box) -> Tensor:
        """Where one of `_parts` lies."""
        assert self._memory is not None
        if self._file is None:
            return self._memory[self._slices(part)]
        if not part:
            return self._memory[0]
        band, start = divmod(part[-1].start, self._band)
        rest = within(all_of(self.shape[:-1]), part[:-1])
        return self._memory[band][(*rest, slice(start, start + len(part[-1])))]

    def _advise(self, place: Tensor, advice: int | None) -> None:
        """Tell the system what becomes of a file's pages; one that does not know the advice goes on as it is."""
        if self._file is None or advice is None:
            return
        size, first = self.dtype.itemsize, int(place.storage_offset())
        start = first * size // mmap.PAGESIZE * mmap.PAGESIZE
        stop = (first + _reach(place.shape, place.stride())) * size
        with contextlib.suppress(OSError):
            self._file.madvise(advice, start, stop - start)

    def _slices(self, box: Box) -> tuple[slice, ...]:
        return within(all_of(self.shape), box)

    def _check(self, box: Box) -> None:
        assert not self._is_freed, f"a kept tensor of {tuple(self.shape)} px is used after it was freed"
        check_inside(box, self.shape)


# ---------------------------------------------------------------------------------------------- boxes in memory


def all_of(shape: Sequence[int]) -> Box:
    return tuple(Interval(0, extent) for extent in shape)


def shown(box: Box) -> str:
    return "[" + ", ".join(f"{interval.start}:{interval.stop}" for interval in box) + "]"


def check_inside(box: Box, shape: torch.Size) -> None:
    is_inside = len(box) == len(shape) and holds(all_of(shape), box)
    assert is_inside, f"the box {shown(box)} is not inside of a whole of {tuple(shape)} px"


def _reach(size: Sequence[int], strides: Sequence[int]) -> int:
    """From its first number to behind its last, how far a box of this size extends in memory."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))


def _slabs(box: Box, strides: Sequence[int], most: int) -> Iterator[Box]:
    """The box in parts that extend over `most` numbers of memory at most, or are one number: halves of halves."""
    size = size_of(box)
    if _reach(size, strides) <= most or max(size) == 1:
        yield box
        return
    dim = max((d for d, extent in enumerate(size) if extent > 1), key=lambda d: strides[d])
    middle = box[dim].start + size[dim] // 2
    for half in (Interval(box[dim].start, middle), Interval(middle, box[dim].stop)):
        yield from _slabs((*box[:dim], half, *box[dim + 1 :]), strides, most)


def _band_of(shape: Sequence[int], order: tuple[int, ...]) -> int:
    """How many columns of an image lie together in a file, so that the pages which a window reads hold little else."""
    is_plain = order == tuple(range(len(order))) and len(order) > 3
    columns = max(1, *shape[-1:], 1)
    return -(-columns // -(-columns // BAND)) if is_plain else columns


def _in_bands(columns: Interval, band: int) -> Iterator[Interval]:
    """An interval, cut at the multiples of `band`."""
    for start in range(columns.start // band * band, columns.stop, band):
        yield Interval(max(start, columns.start), min(start + band, columns.stop))


def _file_order(order: tuple[int, ...]) -> tuple[int, ...]:
    """How a file lays out a whole: as the whole is, but images row by row of all channels, so that a window is near together.

    16 channels of 4096 x 4096 float32 px by windows of 1040 x 1040 px, 1 thread, ext4 in the page cache: 0.25 s to read all
    and 0.18 s to write all again, against 0.28 s and 0.26 s channel by channel, and 0.43 s and 0.26 s pixel by pixel.
    """
    is_plain = order == tuple(range(len(order))) and len(order) > 3
    return (0, 2, 1, *order[3:]) if is_plain else order


def _file_of(size_bytes: int, folder: str) -> mmap.mmap:
    """A file without a name, as memory.  OSError, in words, where it does not fit or cannot be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), size_bytes)
            return mmap.mmap(file.fileno(), size_bytes)
    except OSError as error:
        raise OSError(
            f"no file of {size_bytes:,} bytes, to keep a tensor in, can be made in {folder}: {error.strerror or error}; "
            "make room there, name a folder on a disk that has it, or keep tensors on the host"
        ) from error


def _reserve(file: int, size_bytes: int) -> None:
    """Give a file its size and room on the disk: memory that finds the disk full later kills the process without a word."""
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except (AttributeError, OSError) as error:  # macOS has no such function, some file systems no such thing
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        disk = os.fstatvfs(file)
        if disk.f_bavail * disk.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(file, size_bytes)


# ---------------------------------------------------------------------------------------------- beside what a GPU computes


def _empty(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int], *, is_pinned: bool = False
) -> Tensor:
    return torch.empty_permuted(tuple(size), tuple(order), dtype=dtype, device=device, pin_memory=is_pinned)


def lane_to(device: torch.device, way: str) -> torch.cuda.Stream | None:
    """The stream on which copies go up to a GPU or down from it; None for other devices, whose copies are waited for."""
    if device.type != "cuda":
        return None
    return _lane_of(torch.cuda.current_device() if device.index is None else device.index, way)


@functools.cache
def _lane_of(index: int, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def beside(lane: torch.cuda.Stream | None) -> Any:
    return contextlib.nullcontext() if lane is None else torch.cuda.stream(lane)


def _lowered(
    tile: Tensor, lane: torch.cuda.Stream, device: torch.device, order: Sequence[int]
) -> tuple[Tensor, torch.cuda.Event]:
    """The GPU's tile in pinned memory, from when the event is done."""
    ours = _empty(tile.shape, tile.dtype, device, order).copy_(tile)  # its owner may go on to write to the tile
    there = _empty(tile.shape, tile.dtype, CPU, order, is_pinned=True)
    lane.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(lane):
        there.copy_(ours, non_blocking=True)
    ours.record_stream(lane)
    return there, lane.record_event()


def raised(place: Tensor, device: torch.device, order: Sequence[int]) -> Tensor:
    """The CPU's pixels on the GPU, as soon as the current stream comes to it; nobody waits."""
    return _empty(place.shape, place.dtype, CPU, order, is_pinned=True).copy_(place).to(device, non_blocking=True)


def awaited(there: Tensor, lane: torch.cuda.Stream | None) -> Tensor:
    """What comes on a lane, for use in the current stream, which waits for it while the CPU goes on."""
    if lane is not None:
        current = torch.cuda.current_stream(there.device)
        current.wait_stream(lane)
        there.record_stream(current)
    return there
