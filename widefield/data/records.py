"""Samples that are files: a split of them, and what is common to all: channels and dtype of the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset, Images, Labels
from widefield.data.image import read_image, shape_and_dtype_of, size_of
from widefield.data.splits import Item, split_items
from widefield.data.windowed_files import spacing_of_file, windowed
from widefield.geometry import Interval
from widefield.image_files import ImageFile
from widefield.image_files.image_file import ImageFileError

DTYPES = ("uint8", "uint16", "int16", "float32")


class Target(Protocol):
    """What gives the target of a sample from a file or a table."""

    def read(self, window: tuple[Interval, ...] | None = None) -> int | Tensor:
        """The target, or its part in a window.  BadImageError: a mask cannot be read."""


@dataclass(frozen=True)
class Known:
    """A target of the whole image, from a table."""

    value: int | tuple[int, ...] | tuple[float, ...]

    def read(self, window: tuple[Interval, ...] | None = None) -> int | Tensor:
        if isinstance(self.value, int):
            return self.value
        return torch.tensor(self.value, dtype=torch.float32 if isinstance(self.value[0], float) else torch.uint8)


@dataclass(frozen=True)
class FileRecord:
    """One sample.  files: of the image, several where each has one channel.  weight: how often it is drawn."""

    files: tuple[Path, ...]
    target: Target
    item: Item
    weight: float | None = None


@dataclass(frozen=True)
class PixelKind:
    """What images are read as.  narrow: 16 bits may become 8.  dims: of their pixels, 3 of volumes."""

    channels: int
    dtype: torch.dtype
    narrow: bool = False
    dims: int = 2


@dataclass(frozen=True)
class FileImages:
    """One split of records; see data.Images and data.WindowedImages."""

    records: Sequence[FileRecord]
    kind: PixelKind

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return self._image(index, None), self.target_of(index)

    def target_of(self, index: int) -> int | Tensor:
        return self.records[index].target.read()

    def labels_in(self, index: int, window: tuple[Interval, ...]) -> int | Tensor | None:
        """The part of labels of pixels in a window, without the image; None: windows of their files are not read alone."""
        target = self.records[index].target
        return target.read(window) if getattr(target, "by_window", False) else None

    def image_file(self, index: int) -> ImageFile | None:
        """The file of the image, of which windows are read; None: it has no windows, or several files."""
        files = self.records[index].files
        return windowed(files[0]) if len(files) == 1 else None

    def group_of(self, index: int) -> str | None:
        return self.records[index].item.group

    def name_of(self, index: int) -> str:
        return str(self.records[index].files[0])

    def shape(self, index: int) -> tuple[int, ...]:
        file = self.records[index].files[0]
        return (self.kind.channels, *self._checked(file, size_of(file)))

    def spacing_of(self, index: int) -> tuple[float, ...] | None:
        """The lengths of a pixel along each dim, in mm, where the file tells them.  BadImageError: in no unit of length."""
        spacing = spacing_of_file(self.records[index].files[0])
        return spacing if len(spacing) == self.kind.dims else None

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        return self._image(index, window), self.records[index].target.read(window)

    def _image(self, index: int, window: tuple[Interval, ...] | None) -> Tensor:
        files, kind = self.records[index].files, self.kind
        if len(files) == 1:
            image = read_image(files[0], kind.channels, kind.dtype, narrow=kind.narrow, window=window)
            self._checked(files[0], image.shape[1:])
            return image
        read = [read_image(file, 1, kind.dtype, narrow=kind.narrow, window=window) for file in files]
        for file, part in zip(files, read, strict=True):
            if part.shape != read[0].shape:
                sizes = [" x ".join(map(str, one.shape[1:])) for one in (part, read[0])]
                raise BadImageError(f"the channel {file} is {sizes[0]} pixels and {files[0]} is {sizes[1]}; mend one of them")
        self._checked(files[0], read[0].shape[1:])
        return torch.cat(read)

    def _checked(self, file: Path, size: Sequence[int]) -> Sequence[int]:
        """BadImageError: a volume among images, or the other way round."""
        if len(size) != self.kind.dims:
            size_in_words = " x ".join(map(str, size))
            raise BadImageError(
                f"{file} has {len(size)} dims, {size_in_words}, and the first image to train on has {self.kind.dims}; "
                "keep images and volumes in datasets of their own"
            )
        return size


@dataclass(frozen=True)
class WeightedImages(FileImages):
    """Records that all have a weight."""

    def weight_of(self, index: int) -> float:
        weight = self.records[index].weight
        assert weight is not None
        return weight


def dataset_of_records(
    records: Sequence[FileRecord],
    config: DataConfig,
    *,
    source: str,
    classes: list[str],
    labels: Labels,
    channels: int | None,
    dtype: str | None,
    train: Sequence[FileRecord] | None = None,
    more: Sequence[str] = (),
) -> Dataset:
    """Split records into a Dataset.

    source: of the records, for errors.  channels, dtype: of all images; None: those of the first image to train on.
    train: where folders give the split, the records to train on, and `records` those to evaluate.
    more: what else was found, in words.
    ValueError: no split, options that no image can be read as, or the first image cannot be read.
    """
    more = list(more)
    if train is None:
        sides = split_items([record.item for record in records], config, source=source)
        parts = [[records[index] for index in side] for side in (sides.train, sides.evaluate)]
        more += [f"{sides.left_out} of the test split left out"] if sides.left_out else []
    else:
        parts = [list(train), list(records)]
    if dtype is None and _has_several_dtypes(parts):
        dtype = "float32"
        more += ["of several dtypes, read as float32"]
    kind = kind_of_files(parts[0][0].files, channels, dtype)
    mean, std = normalization_of(kind)
    one, other = (_images(part, kind) for part in parts)
    about = {"labels": labels, "dtype": kind.dtype, "dims": kind.dims}
    found = Dataset(one, other, classes, kind.channels, mean, std, in_memory=False, **about)
    return replace(found, about=described(found, source, more))


def _has_several_dtypes(parts: Sequence[Sequence[FileRecord]]) -> bool:
    """Whether volumes have pixels of several dtypes, as those of several scanners; from their headers."""
    files = (file for part in parts for record in part for file in record.files)
    dtypes = set()
    for file in files:
        try:
            image = windowed(file)
        except (OSError, ImageFileError):  # whoever reads it says so
            continue
        if image is None or len(image.info.size) != 3 or image.info.size[0] == 1:
            return False
        dtypes.add(image.info.dtype)
    return len(dtypes) > 1


def _images(records: Sequence[FileRecord], kind: PixelKind) -> Images:
    return (WeightedImages if all(record.weight is not None for record in records) else FileImages)(records, kind)


def normalization_of(kind: PixelKind) -> tuple[list[float], list[float]]:
    """mean and std of scaled pixels: ImageNet's of RGB, which pretrained weights expect; none for floating-point pixels."""
    if kind.dtype.is_floating_point:
        return [0.0] * kind.channels, [1.0] * kind.channels
    if kind.channels == 3:
        return [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    return [0.5] * kind.channels, [0.25] * kind.channels


def kind_of_files(files: Sequence[Path], channels: int | None, dtype: str | None) -> PixelKind:
    """What all images are read as, from the options, and from the first image where these are None.

    ValueError: the options.  BadImageError: the first image cannot be read.
    """
    check_kind(channels, dtype)
    shape, found = shape_and_dtype_of(files[0])
    if len(files) > 1 and channels not in (None, len(files)):
        raise ValueError(f"data.options.channels is {channels} and images have {len(files)} files, one for each channel")
    return kind_of_first(shape if len(files) == 1 else (len(files), *shape[1:]), found, channels, dtype)


def kind_of_first(shape: Sequence[int], found: torch.dtype, channels: int | None, dtype: str | None) -> PixelKind:
    """The same, of the (C, *pixels) and the dtype of the first image."""
    own = shape[0] if channels is None else channels
    return PixelKind(own, found if dtype is None else getattr(torch, dtype), narrow=dtype == "uint8", dims=len(shape) - 1)


def check_kind(channels: int | None, dtype: str | None) -> None:
    """ValueError: options that no image can be read as."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"data.options.dtype is {dtype!r}; it is one of {', '.join(DTYPES)}, or left out")
    if channels is not None and (type(channels) is not int or channels < 1):
        raise ValueError(f"data.options.channels is {channels!r}; give a number of channels, as 1 for grey or 3 for RGB")


_OF_TARGETS = {"values": "values", "image": "channels of targets"}


def described(dataset: Dataset, source: str, more: Sequence[str]) -> str:
    """As `cells/: 40 images to train on, 10 to evaluate, uint16, 1 channel, 3 classes`."""
    kind = str(dataset.dtype).removeprefix("torch.")
    parts = [
        f"{len(dataset.train)} {'images' if dataset.dims == 2 else 'volumes'} to train on, {len(dataset.evaluate)} to evaluate",
        f"{kind}, {dataset.channels} channel{'s' if dataset.channels > 1 else ''}",
        f"{len(dataset.classes)} {_OF_TARGETS.get(dataset.labels, 'classes')}",
        *more,
    ]
    return f"{source}: {', '.join(parts)}"
