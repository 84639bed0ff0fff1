"""Stores a whole tensor that tiles in time write and read box by box.

An `OffloadBuffer` is on the device, in the host's memory, or in a file without a name, which is deleted with it.  Boxes are in
pixels of the whole, an Interval per dim.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.box import Box, holds, is_empty, meet, rest_of, size_of, within
from widefield.geometry.interval import Interval
from widefield.geometry.strides import stride_order
from widefield.geometry.window import hull
from widefield.naming import did_you_mean
from widefield.streaming.storage.memory_pool import Block, Pool, has_own_memory, is_planned_for_gpu

CPU, META = torch.device("cpu"), torch.device("meta")
PLACES = ("device", "host", "file")
SLAB_BYTES = 16 << 20
"""The largest range of host memory that one copy covers, and so how much of a file is resident at most."""

BAND = 128
"""The width in columns of the bands in which a file stores an image: a row of a band, for all channels, then the next row."""

HOST_BYTES = 2 << 20
"""From this size on, a tensor in the host's memory gets its memory from a pool."""

PendingTile = tuple[Box, Tensor, torch.cuda.Event | None, bool]


@dataclass
class ByteBudget:
    """The bytes of the device that stored tensors may take; those that do not fit go to their place."""

    bytes: int = 0

    def take(self, size: int) -> bool:
        """Whether so many bytes fit.  If so, they are subtracted; the caller adds them again when it frees them."""
        fits = size <= self.bytes
        self.bytes -= size if fits else 0
        return fits


class OffloadBuffer:
    """A whole tensor that is written and read by boxes; zeros where nothing was written.

    shape, dtype, device: of the whole, as its readers get it.
    place: "device": a tensor there.  "host": the host's memory; a GPU's copies use pinned memory and CUDA streams of their own,
        so that they overlap its computation.  "file": a file in the pool's folder (often /tmp; if that is in memory, name
        another).  The file has no name, so that nothing is left after a crash.
    pool: where memory and files come from and return to when they are not used any more; None: torch's memory, a new file.
    room: while it lasts, the tensor is on the device in any case.
    order: the dims from outermost to innermost in memory, as for `torch.empty_permuted`; None: as they are.
    Memory is allocated at the first write or add, so that what was freed before can be used again.
    ValueError: an unknown place.  OSError, at the first write or add: the file does not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        place: str = "device",
        order: Sequence[int] | None = None,
        pool: Pool | None = None,
        room: ByteBudget | None = None,
    ) -> None:
        if place not in PLACES:
            hint = did_you_mean(str(place), PLACES)
            raise ValueError(f"there is no place {place!r} to keep tensors in{hint} There are: {', '.join(PLACES)}.")
        self.shape, self.dtype, self.device, self.place = torch.Size(shape), dtype, torch.device(device), place
        self.order = tuple(range(len(self.shape)) if order is None else order)
        self._is_on_device = place == "device" or (place == "host" and not has_own_memory(self.device))
        self._room, self._taken = room, 0
        self._pool = pool
        self._memory: Tensor | None = None
        self._file: Block | None = None
        self._written: list[Box] = []  # disjoint boxes
        self._band = 1
        self._pending: PendingTile | None = None
        self._is_freed = False

    @classmethod
    def of(cls, tensor: Tensor) -> OffloadBuffer:
        """A buffer that shares the memory of `tensor`."""
        buffer = cls(tensor.shape, tensor.dtype, tensor.device, order=stride_order(tensor.stride()))
        buffer._memory, buffer._written = tensor.detach(), [all_of(tensor.shape)]
        return buffer

    @property
    def bytes(self) -> int:
        """The bytes of the whole, allocated or not."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether no memory is allocated: nothing was written yet, or it was freed."""
        return self._memory is None

    def write(self, box: Box, tile: Tensor) -> None:
        """Overwrite a box by a tile of its size and of the whole's dtype (asserted)."""
        self._put(box, tile, adds=False)

    def add(self, box: Box, tile: Tensor) -> None:
        """Add a tile to a box; where nothing was written, to zeros."""
        self._put(box, tile, adds=True)

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, on the device, in the whole's memory format; not to be written to.

        A view if the whole is on the device, else a copy, which overlaps a GPU's computation.
        """
        self._check(box)
        if is_empty(box) or self._memory is None:
            return _empty(size_of(box), self.dtype, self.device, self.order).zero_()
        self._flush()
        for blank in self._mark_written(box):
            for part in self._parts(blank):
                self._put_part(part, None, adds=False)
        return self._memory[self._slices(box)] if self._is_on_device else self._copy_to_device(box)

    def whole(self) -> Tensor:
        """All pixels, as by `read`; if the whole is on the device, the tensor itself and not a view."""
        there = self.read(all_of(self.shape))
        return self._memory if self._is_on_device and self._memory is not None else there

    def free(self) -> None:
        """Free the memory or file.  Afterwards nothing can be written or read; a second call does nothing."""
        self._pending = self._memory = self._file = self._pool = None
        if self._room is not None:
            self._room.bytes += self._taken
        self._taken = 0
        self._is_freed = True

    def __del__(self) -> None:
        """A forward without a backward frees nothing by name, and its part of the budget is another's then."""
        if getattr(self, "_taken", 0):
            self.free()

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
            self._memory = self._allocate()
        self._flush()
        self._pending = (box, *self._to_storage(tile.detach()), adds)
        if self._pending[2] is None:
            self._flush()

    def _flush(self) -> None:
        """Write the pending tile to storage.  A GPU's tile is written at the next call, so that its copy can overlap."""
        if self._pending is None or self._memory is None:
            return
        (box, tile, done, adds), self._pending = self._pending, None
        if done is not None:
            done.synchronize()
        before = [meet(box, written) for written in self._written] if adds else []
        blank = self._mark_written(box)
        for pieces, is_added in ((before, True), (blank if adds else [box], False)):
            for part in (part for piece in pieces if not is_empty(piece) for part in self._parts(piece)):
                self._put_part(part, tile[within(box, part)], adds=is_added)

    def _put_part(self, part: Box, pixels: Tensor | None, *, adds: bool) -> None:
        """Write or add `pixels` to one of `_parts`; None: zeros."""
        place = self._place(part)
        if self._file is not None:
            self._file.make_ready(*self._range(place))
        if pixels is None:
            place.zero_()
        elif adds:
            place.add_(pixels)
        else:
            place.copy_(pixels)
        if self._file is not None:
            self._file.drop(*self._range(place))

    def _to_storage(self, tile: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The tile on the storage's device, and the event to wait for before it is read."""
        if self._is_on_device:
            return tile, None
        copy_stream = copy_stream_to(self.device, "down")
        return (tile.cpu(), None) if copy_stream is None else _copy_down(tile, copy_stream, self.device, self.order)

    def _copy_to_device(self, box: Box) -> Tensor:
        """A copy on the device of a box that is stored elsewhere."""
        assert self._memory is not None
        copy_stream = copy_stream_to(self.device, "up")
        with on_stream(copy_stream):
            there = _empty(size_of(box), self.dtype, self.device, self.order)
            for part in self._parts(box):
                place = self._place(part)
                there[within(box, part)].copy_(place if copy_stream is None else to_device(place, self.device, self.order))
                if self._file is not None:
                    self._file.drop(*self._range(place))
        return wait_for_copy(there, copy_stream)

    # ------------------------------------------------------------------------------------------ memory

    def _allocate(self) -> Tensor:
        if not self._is_on_device and self._room is not None and self._room.take(self.bytes):
            self._is_on_device, self._taken = True, self.bytes
        if self._is_on_device or self.place != "file" or not self.bytes:
            device = self.device if self._is_on_device else CPU
            is_pooled = self.bytes >= HOST_BYTES and self._pool is not None
            if is_planned_for_gpu():
                is_pooled = not self._is_on_device
            if device.type != "cpu" or not is_pooled:
                return _empty(self.shape, self.dtype, device, self.order)
            _, memory = (self._pool or Pool()).host.take(self.bytes)
            strides = _empty(self.shape, self.dtype, META, self.order).stride()
            return memory[: self.bytes].view(self.dtype).as_strided(self.shape, strides)
        self._band = _band_of(self.shape, self.order)
        bands, shape = -(-self.shape[-1] // self._band) if self.shape else 1, (*self.shape[:-1], self._band)[: len(self.shape)]
        size = bands * math.prod(shape) * self.dtype.itemsize
        self._file, memory = (self._pool or Pool()).file.take(size)
        strides = _empty(shape, self.dtype, META, _file_order(self.order)).stride()
        return memory[:size].view(self.dtype).as_strided((bands, *shape), (math.prod(shape), *strides))

    def _mark_written(self, box: Box) -> list[Box]:
        """Mark a box as written; the parts of it that were not written before."""
        blank = [box]
        for written in self._written:
            blank = [rest for part in blank for rest in rest_of(part, meet(part, written))]
        for part in blank:
            self._written = _join(self._written, part)
        return blank

    def _parts(self, box: Box) -> Iterator[Box]:
        """The box in parts that each cover a small range of memory, in one band."""
        assert self._memory is not None
        if self._is_on_device:
            return iter([box])
        most = SLAB_BYTES // self.dtype.itemsize
        if self._file is None:
            return _slabs(box, self._memory.stride(), most)
        in_bands = [(*box[:-1], columns) for columns in _in_bands(box[-1], self._band)] if box else [box]
        return itertools.chain.from_iterable(_slabs(part, self._memory.stride()[1:], most) for part in in_bands)

    def _place(self, part: Box) -> Tensor:
        """The view of the storage for one of `_parts`."""
        assert self._memory is not None
        if self._file is None:
            return self._memory[self._slices(part)]
        if not part:
            return self._memory[0]
        band, start = divmod(part[-1].start, self._band)
        rest = within(all_of(self.shape[:-1]), part[:-1])
        return self._memory[band][(*rest, slice(start, start + len(part[-1])))]

    def _range(self, place: Tensor) -> tuple[int, int]:
        """The range of bytes of a file that a view covers, start and stop."""
        first, size = int(place.storage_offset()), self.dtype.itemsize
        return first * size, (first + _reach(place.shape, place.stride())) * size

    def _slices(self, box: Box) -> tuple[slice, ...]:
        return within(all_of(self.shape), box)

    def _check(self, box: Box) -> None:
        assert not self._is_freed, f"a stored tensor of {tuple(self.shape)} px is used after it was freed"
        check_inside(box, self.shape)


# ---------------------------------------------------------------------------------------------- boxes in memory


def all_of(shape: Sequence[int]) -> Box:
    return tuple(Interval(0, extent) for extent in shape)


def _join(boxes: Sequence[Box], new: Box) -> list[Box]:
    """Disjoint boxes and a new one, with adjacent boxes joined where their union is a box."""
    for number, box in enumerate(boxes):
        unlike = [dim for dim, (a, b) in enumerate(zip(box, new, strict=True)) if a != b]
        if len(unlike) == 1 and (box[unlike[0]].stop == new[unlike[0]].start or new[unlike[0]].stop == box[unlike[0]].start):
            joined = tuple(hull([a, b]) for a, b in zip(box, new, strict=True))
            return _join([*boxes[:number], *boxes[number + 1 :]], joined)
    return [*boxes, new]


def shown(box: Box) -> str:
    return "[" + ", ".join(f"{interval.start}:{interval.stop}" for interval in box) + "]"


def check_inside(box: Box, shape: torch.Size) -> None:
    is_inside = len(box) == len(shape) and holds(all_of(shape), box)
    assert is_inside, f"the box {shown(box)} is not inside of a whole of {tuple(shape)} px"


def _reach(size: Sequence[int], strides: Sequence[int]) -> int:
    """The length of the range of memory that a box covers, in numbers."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))


def _slabs(box: Box, strides: Sequence[int], most: int) -> Iterator[Box]:
    """Halve a box until each part covers at most `most` numbers of memory, or is a single number."""
    size = size_of(box)
    if _reach(size, strides) <= most or max(size) == 1:
        yield box
        return
    dim = max((d for d, extent in enumerate(size) if extent > 1), key=lambda d: strides[d])
    middle = box[dim].start + size[dim] // 2
    for half in (Interval(box[dim].start, middle), Interval(middle, box[dim].stop)):
        yield from _slabs((*box[:dim], half, *box[dim + 1 :]), strides, most)


def _band_of(shape: Sequence[int], order: tuple[int, ...]) -> int:
    """The width of an image's bands in a file, so that the pages that a window reads contain little else."""
    is_plain = order == tuple(range(len(order))) and len(order) > 3
    columns = max(1, *shape[-1:], 1)
    return -(-columns // -(-columns // BAND)) if is_plain else columns


def _in_bands(columns: Interval, band: int) -> Iterator[Interval]:
    """An interval, divided at the multiples of `band`."""
    for start in range(columns.start // band * band, columns.stop, band):
        yield Interval(max(start, columns.start), min(start + band, columns.stop))


def _file_order(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dims in a file: that of the tensor, but for images row by row of all channels, so that windows are compact.

    16 channels of 4096 x 4096 float32 px by windows of 1040 x 1040 px, 1 thread, ext4 in the page cache: 0.25 s to read all
    and 0.18 s to write all again, against 0.28 s and 0.26 s channel by channel, and 0.43 s and 0.26 s pixel by pixel.
    """
    is_plain = order == tuple(range(len(order))) and len(order) > 3
    return (0, 2, 1, *order[3:]) if is_plain else order


# ---------------------------------------------------------------------------------------------- copies that overlap computation


def _empty(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int], *, is_pinned: bool = False
) -> Tensor:
    return torch.empty_permuted(tuple(size), tuple(order), dtype=dtype, device=device, pin_memory=is_pinned)


def copy_stream_to(device: torch.device, direction: str) -> torch.cuda.Stream | None:
    """The CUDA stream for copies to a GPU ("up") or from it ("down"); None for other devices, where copies are synchronous."""
    if device.type != "cuda":
        return None
    return _copy_stream(torch.cuda.current_device() if device.index is None else device.index, direction)


@functools.cache
def _copy_stream(index: int, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def on_stream(copy_stream: torch.cuda.Stream | None) -> Any:
    return contextlib.nullcontext() if copy_stream is None else torch.cuda.stream(copy_stream)


def _copy_down(
    tile: Tensor, copy_stream: torch.cuda.Stream, device: torch.device, order: Sequence[int]
) -> tuple[Tensor, torch.cuda.Event]:
    """A copy of a GPU's tile in pinned memory, which is complete when the event is done."""
    ours = _empty(tile.shape, tile.dtype, device, order).copy_(tile)  # the caller may write to the tile meanwhile
    there = _empty(tile.shape, tile.dtype, CPU, order, is_pinned=True)
    copy_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(copy_stream):
        there.copy_(ours, non_blocking=True)
    ours.record_stream(copy_stream)
    return there, copy_stream.record_event()


def to_device(place: Tensor, device: torch.device, order: Sequence[int]) -> Tensor:
    """An asynchronous copy of the host's pixels to the GPU, on the current stream."""
    return _empty(place.shape, place.dtype, CPU, order, is_pinned=True).copy_(place).to(device, non_blocking=True)


def wait_for_copy(there: Tensor, copy_stream: torch.cuda.Stream | None) -> Tensor:
    """A tensor that is copied on `copy_stream`, for use on the current stream, which waits for the copy; the CPU does not."""
    if copy_stream is not None:
        current = torch.cuda.current_stream(there.device)
        current.wait_stream(copy_stream)
        there.record_stream(current)
    return there
