"""An image in a file, or computed by a function, that a streamed module reads window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.geometry.box import Box, is_empty, size_of, within
from widefield.geometry.layout import Grid
from widefield.streaming.storage.offload_buffer import (
    all_of,
    check_inside,
    copy_stream_to,
    on_stream,
    shown,
    to_device,
    wait_for_copy,
)

SINGLE_RANK = Grid(())


def from_reader(
    read: Callable[[tuple[slice, ...]], Any],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> WindowedImage:
    """An image that is never in memory as a whole, as an input of a streamed module: from a file, or from a function.

    read(window): returns the pixels of a window, as a torch tensor or a numpy array of the window's size.  `window` is a tuple
        of slices with start and stop, one per dim of the whole, so an array can be indexed with it.  Windows overlap, and some
        are read more than once; each time the pixels must be the same.
    shape: of the whole, as (batch, channels, height, width).  dtype, device: of the tensors that the module gets.
    Cost: one call per tile and pass; copies to a GPU overlap its computation.
    ValueError: here for bad arguments; when a window is read, if the result has another size than the window, or a dtype with
        values that `dtype` cannot represent, such as float64 for float32.

    Pixels in a raw file, in one of tifffile's zarr stores (height, width, channels), and in a raster of bands:

        pixels = numpy.memmap("page.raw", numpy.uint8, "r", shape=(1, 3, 40_000, 30_000))
        image = widefield.from_reader(lambda window: pixels[window], pixels.shape)

        slide = zarr.open(tifffile.imread("slide.tif", aszarr=True, level=0), mode="r")
        image = widefield.from_reader(lambda w: slide[w[2], w[3], w[1]].transpose(2, 0, 1)[None], (1, 3, *slide.shape[:2]))

        scene = rasterio.open("scene.tif")
        image = widefield.from_reader(
            lambda w: scene.read(window=rasterio.windows.Window.from_slices(w[2], w[3]))[w[1]][None],
            (1, scene.count, scene.height, scene.width),
        )
    """
    if not callable(read):
        raise ValueError(f"read is a {type(read).__name__} and is to be a function; write lambda window: it[window]")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is none of torch's; write it as torch.float32")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape={tuple(shape)} has a negative size; give the pixels of the whole on every dim")
    return WindowedImage(read, torch.Size(shape), dtype, torch.device(device))


class WindowedImage:
    """What `from_reader` returns: an image whose windows a function reads.

    grid: the ranks over which it is in tiles; each reads its own and the pixels around by itself, without a message.
    """

    def __init__(
        self,
        read: Callable[..., Any],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        grid: Grid = SINGLE_RANK,
    ) -> None:
        self._read, self.shape, self.dtype, self.device, self.grid = read, shape, dtype, device, grid

    def __repr__(self) -> str:
        return f"Reader(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def read(self, box: Box) -> Tensor:
        """The pixels of a box, as `dtype` on `device`; not to be written to.  ValueError: see `from_reader`."""
        check_inside(box, self.shape)
        if is_empty(box):
            return torch.empty(size_of(box), dtype=self.dtype, device=self.device)
        pixels = self._checked(self._read(within(all_of(self.shape), box)), box)
        copy_stream = copy_stream_to(self.device, "up")
        if copy_stream is None or pixels.device.type != "cpu":
            return pixels.to(self.device, self.dtype)
        with on_stream(copy_stream):
            there = to_device(pixels, self.device, tuple(range(pixels.ndim)))
        return wait_for_copy(there, copy_stream).to(self.dtype)

    def _checked(self, given: Any, box: Box) -> Tensor:
        tensor = _as_tensor(given)
        what = f"the window {shown(box)} of a whole of {tuple(self.shape)} px"
        if tensor is None:
            came = f"a {type(given).__name__}" + (f" of {given.dtype}" if isinstance(given, np.ndarray) else "")
            raise ValueError(f"the reader gave {came} for {what}; give a torch tensor or a numpy array of numbers")
        if tuple(tensor.shape) != size_of(box):
            raise ValueError(
                f"the reader gave {tuple(tensor.shape)} px for {what}, which has {size_of(box)}; "
                "give the window's pixels, with a dim for each of the whole's"
            )
        if not keeps_values(tensor.dtype, self.dtype):
            raise ValueError(
                f"the reader gave {tensor.dtype} for {what}, and {self.dtype}, which is wanted, lacks some of its values; "
                f"give from_reader dtype={tensor.dtype}, or convert in the reader if they fit"
            )
        return tensor


def keeps_values(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether the dtype `wanted` can represent every value of the dtype `given`.

    >>> [keeps_values(torch.uint8, wanted) for wanted in (torch.bfloat16, torch.int8)], keeps_values(torch.int64, torch.float64)
    ([True, False], False)
    """
    if given == wanted or given == torch.bool:
        return True
    if wanted == torch.bool or (given.is_complex and not wanted.is_complex):
        return False
    is_float = wanted.is_floating_point or wanted.is_complex
    if given.is_floating_point or given.is_complex:
        a, b = torch.finfo(given), torch.finfo(wanted) if is_float else None
        return b is not None and b.eps <= a.eps and b.max >= a.max
    low, high = torch.iinfo(given).min, torch.iinfo(given).max
    if is_float:
        return max(-low, high) <= 2 / torch.finfo(wanted).eps  # all integers up to 2 ** digits are exact
    return torch.iinfo(wanted).min <= low and high <= torch.iinfo(wanted).max


def _as_tensor(given: Any) -> Tensor | None:
    """The result of a reader as a tensor; None if it is neither a tensor nor an array of numbers."""
    if isinstance(given, Tensor):
        return given.detach()
    if not isinstance(given, np.ndarray) or isinstance(given, np.ma.MaskedArray):  # a mask would be lost silently
        return None
    array = given.astype(given.dtype.newbyteorder("="), copy=False)  # a TIFF may have the other byte order
    try:
        if not array.flags.writeable or any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = array.copy()  # torch has no read-only tensors, negative strides, or strides of part of an element
        return torch.from_numpy(array)
    except TypeError:
        return None
