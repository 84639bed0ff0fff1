"""Folders of images and their targets, which are images too, paired by the stems of their names.

train/input/a.png, train/target/a.png, val/input/b.png, val/target/b.png
input/a.png, target/a.png              data.hold_out or data.fold splits them
input/train/a.png, target/train/a.png, input/val/b.png, target/val/b.png

Other names of these folders: lq, lr, low, noisy, degraded, and gt, hq, hr, high, clean, in any case.  A target has the size of
its input, or a whole number of times that, the same for all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.image import read_image, shape_and_dtype_of, size_of
from widefield.data.mask_layouts import TRAIN, VAL, files_below
from widefield.data.pixel_files import SUFFIXES
from widefield.data.records import FileRecord, PixelKind, dataset_of_records, kind_of_files
from widefield.data.splits import Item, group_in
from widefield.data.windowed_files import windowed
from widefield.geometry import Interval
from widefield.geometry.box import enlarged

INPUTS = ("input", "inputs", "lq", "lr", "low", "noisy", "degraded")
TARGETS = ("target", "targets", "gt", "hq", "hr", "high", "clean")
CHANNELS = {1: ["grey"], 3: ["red", "green", "blue"]}


@dataclass(frozen=True)
class TargetImage:
    """The target of an input: a file, of `scale` times its pixels along each dim."""

    file: Path
    kind: PixelKind
    scale: int

    @property
    def by_window(self) -> bool:
        image = windowed(self.file)
        return self.file.suffix.lower() == ".npy" if image is None else image.info.by_window

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        """(K, *pixels), or the part that belongs to a window of the input.  BadImageError: it cannot be read."""
        box = None if window is None else enlarged(window, self.scale)
        kind = self.kind
        return read_image(self.file, kind.channels, kind.dtype, narrow=kind.narrow, window=box, dims=kind.dims)


@dataclass(frozen=True)
class FilePair:
    """An input and its target."""

    name: str
    image: Path
    target: Path


def open_dataset(
    config: DataConfig,
    *,
    scale: int | None = None,
    channels: int | None = None,
    target_channels: int | None = None,
    dtype: str | None = None,
    group: str | None = None,
) -> Dataset:
    """scale: how many pixels of a target one of its input is, along each dim; None: as the first pair has it.

    channels, target_channels, dtype: None: those of the first pair; both have one dtype.  group: a regular expression whose
    match in a name is the group.
    ValueError, which names the file: folders, partners or sizes that do not fit.
    """
    if config.path is None or not Path(config.path).is_dir():
        raise ValueError(f"data.path is {config.path} and data.name=pairs reads a folder; name one that exists: data.path=DIR")
    root = Path(config.path)
    sides = [_paired(*folders) for folders in _folders(root)]
    first = sides[0][0]
    kind = kind_of_files((first.image,), channels, dtype)
    of_target, scale = _kind_of_target(first, kind, target_channels), scale or _scale_of(first)
    records = [_records(pairs, of_target, scale, group) for pairs in sides]
    train = None
    if len(records) == 2:
        train = records[0]
        _refuse_split(config, root)
    found = dataset_of_records(
        records[-1], config, source=str(root), classes=_names(of_target.channels), labels="image", channels=kind.channels,
        dtype=dtype, train=train, more=[f"targets of {scale} times the pixels along each dim"] if scale > 1 else [],
    )  # fmt: skip
    return replace(found, scale=scale)


def _folders(root: Path) -> list[tuple[Path, Path]]:
    """(inputs, targets) to train on and to evaluate, or of all.  ValueError: none are there."""
    inputs, targets = _first(root, INPUTS), _first(root, TARGETS)
    if inputs and targets:
        inner = [(_first(inputs, names), _first(targets, names)) for names in (TRAIN, VAL)]
        both = [(one, other) for one, other in inner if one and other]
        return both if len(both) == 2 else [(inputs, targets)]
    outer = [_first(root, names) for names in (TRAIN, VAL)]
    pairs = [(_first(place, INPUTS), _first(place, TARGETS)) for place in outer if place is not None]
    found = [(one, other) for one, other in pairs if one and other]
    if found and len(found) == len(pairs):
        return found
    have = ", ".join(sorted(entry.name for entry in root.iterdir() if entry.is_dir())) or "no folders"
    raise ValueError(
        f"{root} has no folders of inputs and targets; put them into {root}/input and {root}/target, or into train/input, "
        f"train/target, val/input and val/target. It has: {have}"
    )


def _first(root: Path, names: Sequence[str]) -> Path | None:
    """The folder of one of these names, in any case."""
    by_name = {entry.name.lower(): entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    return next((by_name[name] for name in names if name in by_name), None)


def _paired(inputs: Path, targets: Path) -> list[FilePair]:
    """ValueError: an input without target, or the other way round."""
    images, wanted = files_below(inputs, SUFFIXES), files_below(targets, SUFFIXES)
    for stem, file in {**images, **wanted}.items():
        if stem not in images or stem not in wanted:
            lacks, where = ("target", targets) if stem in images else ("input", inputs)
            raise ValueError(
                f"{images.get(stem, file)} has no {lacks}: {where} has no file of its stem; add it, or remove the file"
            )
    return [FilePair(stem, file, wanted[stem]) for stem, file in images.items()]


def _kind_of_target(pair: FilePair, kind: PixelKind, channels: int | None) -> PixelKind:
    """As the input's, which has the dtype of both: what is read as it without loss."""
    shape, _ = shape_and_dtype_of(pair.target, dims=kind.dims)
    return replace(kind, channels=channels or shape[0])


def _scale_of(pair: FilePair) -> int:
    (image, *_), (target, *_) = size_of(pair.image), size_of(pair.target)
    return max(1, target // image)


def _records(pairs: Sequence[FilePair], kind: PixelKind, scale: int, group: str | None) -> list[FileRecord]:
    """ValueError: a target is not `scale` times as large as its input.  Only headers are read."""

    def check(one: FilePair) -> str | None:
        size, other = size_of(one.image), size_of(one.target)
        if other == tuple(scale * extent for extent in size):
            return None
        sizes = [" x ".join(map(str, shape)) for shape in (other, size)]
        return (
            f"{one.target} is {sizes[0]} pixels and {one.image} is {sizes[1]}, which is no scale of {scale}; mend one of them, "
            "or set data.options.scale"
        )

    with ThreadPoolExecutor(8) as pool:
        problem = next((problem for problem in pool.map(check, pairs) if problem), None)
    if problem is not None:
        raise ValueError(problem)
    return [
        FileRecord((one.image,), TargetImage(one.target, kind, scale), Item(one.name, group=group_in(one.name, group)))
        for one in pairs
    ]


def _refuse_split(config: DataConfig, root: Path) -> None:
    for key in ("hold_out", "fold"):
        if getattr(config, key) is not None:
            raise ValueError(f"{root} has folders to train on and to evaluate, so leave data.{key}={getattr(config, key)} out")


def _names(channels: int) -> list[str]:
    return CHANNELS.get(channels) or [f"channel {number}" for number in range(1, channels + 1)]


def _sample_pairs(place: Path, write: Callable[[Path], None]) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            write(place / split / "input" / f"{number}.png")
            write(place / split / "target" / f"{number}.png")
    return place


CASES = [({"path": _sample_pairs}, 4, 2, 3)]
"""As in imagefolder.py."""
