"""Masks: files that say the classes of an image's pixels, by palette index, grey number or colour.

Pixels that do not count get the label `ignored_label`, whatever marks them in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from widefield.data import BadImageError
from widefield.data.pixel_files import bits_of
from widefield.data.windowed_files import PLAIN, read_box, size_of, windowed
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.image_files import ImageFile
from widefield.image_files.bytes_read import add_read
from widefield.image_files.image_file import ImageFileError
from widefield.image_files.opening import suffixes

Array = np.ndarray[Any, Any]
Colour = tuple[int, int, int]
LOSSY = (".jpg", ".jpeg", ".webp")
SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".npy", *(suffix for suffix in suffixes() if suffix not in PLAIN))


def ignored_label(classes: int) -> int:
    """The label of pixels that do not count: 255 as long as no class has that number, else -1.

    >>> ignored_label(19), ignored_label(300)
    (255, -1)
    """
    return 255 if classes <= 255 else -1


def raw_mask(path: Path, *, colours: bool = False, window: tuple[Interval, ...] | None = None) -> Array:
    """Numbers of a mask as it is stored, (H, W) integers; with `colours`, 65536 red + 256 green + blue.  (D, H, W) of a volume.

    window: rows and columns, or planes and these; read alone where the format of the file has windows.

    BadImageError: it cannot be read.  ValueError: its format loses values, or it has colours and numbers are wanted.
    """
    if path.suffix.lower() in LOSSY:
        raise ValueError(f"the mask {path} is {path.suffix}, which changes the numbers of pixels; save masks as PNG")
    with _named(path):
        image = windowed(path, numbers=True)
        is_volume = image is not None and len(size_of(image)) == 3
        if image is not None:
            array = _by_window(image, window, colours and not is_volume)
        elif path.suffix.lower() == ".npy":
            array = np.lib.format.open_memmap(path, mode="r")
            array = array[0] if array.ndim == 3 and len(array) == 1 else array
            array = np.array(array if window is None else array[slices(window)])
            add_read(asked=array.nbytes, decoded=array.nbytes)
        else:
            whole = _by_pillow(path, colours)
            array = whole if window is None else whole[slices(window)]
            add_read(asked=array.nbytes, decoded=whole.nbytes)
    if is_volume and colours:
        raise ValueError(f"the mask {path} is a volume, and data.options.classes has colours; give numbers there")
    if is_volume and array.ndim != 3:
        raise ValueError(f"the mask {path} is a volume of {len(array)} channels; save class numbers, in one channel")
    if array.ndim == 3 and not colours and not is_volume:
        if (array != array[..., :1]).any():
            raise ValueError(
                f"the mask {path} has colours; say which class each is: data.options.classes={{road: [255, 0, 0]}}"
            )
        array = array[..., 0]  # a grey mask that was saved as RGB
    elif array.ndim == 3 and not is_volume:
        array = array.astype(np.int32) @ np.array([65536, 256, 1], dtype=np.int32)
    elif colours:
        raise ValueError(f"the mask {path} is an array of numbers, and data.options.classes has colours; give numbers there")
    if array.ndim != 2 + is_volume or array.dtype.kind not in "biu":
        raise ValueError(f"the mask {path} is {array.dtype} of shape {array.shape}; (H, W) whole numbers are wanted")
    return array.astype(np.uint8) if array.dtype == bool else array


def reads_windows(path: Path) -> bool:
    """Whether a window of a mask is read without the rest.  BadImageError: it cannot be opened."""
    with _named(path):
        image = windowed(path, numbers=True)
        return path.suffix.lower() == ".npy" if image is None else image.info.by_window


def _by_window(image: ImageFile, window: tuple[Interval, ...] | None, colours: bool) -> Array:
    """(H, W) numbers, or (H, W, 3) colours; a palette's numbers, or its colours where these are wanted."""
    array = read_box(image, window)
    if image.info.palette and colours:
        return np.array(image.info.palette, dtype=np.uint8)[:, :3][array[0]]
    if len(array) == 1:
        return np.repeat(array[0][..., None], 3, axis=-1) if colours else array[0]
    return np.moveaxis(array[:3], 0, -1) if image.info.colours in ("RGB", "RGBA") else array


def _by_pillow(path: Path, colours: bool) -> Array:
    """(H, W) numbers or (H, W, 3) colours; a palette's indices, or its colours where these are wanted."""
    with Image.open(path) as image:
        if bits_of(image, path) > 8 and image.mode in ("RGB", "RGBA"):
            raise ValueError("colours of 16 bits; save it with 8")
        upright = ImageOps.exif_transpose(image)
        if colours or image.mode not in ("1", "L", "P", "I", "F") and not image.mode.startswith("I;"):
            return np.array(upright.convert("RGB"))
        return np.array(upright)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except ImageFileError as error:
        raise BadImageError(str(error)) from None
    except Exception as error:  # decoders raise many types on damaged files
        reason = str(error) or type(error).__name__ if path.is_file() else "there is no such file"
        raise BadImageError(f"cannot read the mask {path} ({reason})") from None


def mask_size(path: Path) -> tuple[int, ...]:
    """(H, W), or (D, H, W), from the file's header.  BadImageError: it cannot be read."""
    with _named(path):
        image = windowed(path, numbers=True)
        if image is not None:
            return size_of(image)
        if path.suffix.lower() == ".npy":
            height, width = np.lib.format.open_memmap(path, mode="r").shape[-2:]
            return height, width
        with Image.open(path) as image:
            width, height = image.size
            return (width, height) if image.getexif().get(0x0112, 1) > 4 else (height, width)


@dataclass(frozen=True)
class Coding:
    """Which stored number means which class.

    names: of the classes.  number_of: class number by stored number; by colour, as `raw_mask` has it, with `colours`.
    ignored: the stored numbers of pixels that do not count.
    """

    names: tuple[str, ...]
    number_of: Mapping[int, int]
    ignored: frozenset[int] = frozenset()
    colours: bool = False

    def labels(self, path: Path, window: tuple[Interval, ...] | None = None) -> Tensor:
        """(H, W) class numbers of a mask, uint8 or int64.  ValueError, with the file: a stored number that means nothing."""
        raw = raw_mask(path, colours=self.colours, window=window)
        stored, labels = self._table
        place = np.searchsorted(stored, raw).clip(max=len(stored) - 1)
        unknown = stored[place] != raw
        if unknown.any():
            raise ValueError(self._unknown(path, raw[unknown]))
        return torch.from_numpy(labels[place])

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        """Stored numbers, sorted, and the label of each."""
        ignored = ignored_label(len(self.names))
        label_of = {**dict.fromkeys(self.ignored, ignored), **self.number_of}
        stored = sorted(label_of)
        dtype = np.uint8 if ignored >= 0 else np.int64
        return np.array(stored, dtype=np.int64), np.array([label_of[number] for number in stored], dtype=dtype)

    def _unknown(self, path: Path, found: Array) -> str:
        value = int(found[0])
        shown = f"the colour {[value >> 16, value >> 8 & 255, value & 255]}" if self.colours else f"the number {value}"
        return (
            f"the mask {path} has {shown} in {len(found):,} pixels, and data.options.classes has no class for it; add it, "
            "or set data.options.ignore to it"
        )


@dataclass(frozen=True)
class Mask:
    """The target `pixels`: one file of class numbers."""

    file: Path
    coding: Coding

    @property
    def by_window(self) -> bool:
        return reads_windows(self.file)

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        return self.coding.labels(self.file, window)


@dataclass(frozen=True)
class Layers:
    """The target `layers`: for each class a file of its pixels, 0 and one other number; None: it has none.

    size: of the image, (H, W) or (D, H, W).
    """

    files: tuple[Path | None, ...]
    size: tuple[int, ...]

    @property
    def by_window(self) -> bool:
        return all(file is None or reads_windows(file) for file in self.files)

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        return torch.from_numpy(np.stack([self._layer(file, window) for file in self.files]))

    def _layer(self, file: Path | None, window: tuple[Interval, ...] | None) -> Array:
        if file is None:
            return np.zeros(self.size if window is None else [len(run) for run in window], dtype=np.uint8)
        raw = raw_mask(file, window=window)
        found = np.unique(raw) if raw.size else np.zeros(1, dtype=raw.dtype)
        if len(found) > 2 or (len(found) == 2 and found[0] != 0) or int(found[-1]) not in (0, 1, 255):
            raise ValueError(
                f"the mask {file} of one class has the numbers {found[:5].tolist()}; 0 and 255, or 0 and 1, are wanted"
            )
        return (raw != 0).astype(np.uint8)


@dataclass(frozen=True)
class Regions:
    """The target `layers` from one file: each class is the pixels of any of several stored numbers."""

    file: Path
    numbers: tuple[tuple[int, ...], ...]
    known: frozenset[int]

    @property
    def by_window(self) -> bool:
        return reads_windows(self.file)

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        raw = raw_mask(self.file, window=window)
        odd = sorted(set(np.unique(raw).tolist()) - self.known)
        if odd:
            raise ValueError(
                f"the mask {self.file} has the number {odd[0]}, and dataset.json has no label for it; add it there"
            )
        return torch.from_numpy(np.stack([np.isin(raw, one) for one in self.numbers]).astype(np.uint8))
