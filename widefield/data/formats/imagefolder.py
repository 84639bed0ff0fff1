"""Class folders, as ImageNet is commonly stored: `path/train/CLASS/image.jpg` and `path/val/CLASS/image.jpg`.

Without train/ and val/, `path/CLASS/image.jpg` is read and a share `data.hold_out` of it is held out for evaluation, chosen by
the names of the files.  Folders may be nested below a class, and be links to other folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.pixel_files import SUFFIXES
from widefield.data.records import FileImages, FileRecord, Known, kind_of_files, normalization_of
from widefield.data.splits import Item, group_in, split_items
from widefield.naming import did_you_mean


@dataclass(frozen=True)
class Files(FileImages):
    """Image files below `root`, sorted."""

    root: Path


def open_dataset(
    config: DataConfig, *, channels: int | None = 3, dtype: str | None = None, group: str | None = None
) -> Dataset:
    """Images in class folders.

    channels: of all images, 3 for RGB and 1 for grey; None: those of the first one.  dtype: of all; None: of the first one.
    group: a regular expression whose match in a file's name is its group, which hold_out and folds do not divide.
    ValueError: a missing or empty folder, an empty class, or a class that only val/ has.
    """
    root = _existing(config.path)
    train_folder = root / "train"
    val_folder = next((root / name for name in ("val", "validation", "test") if (root / name).is_dir()), None)
    if train_folder.is_dir() and val_folder is not None:
        for key in ("hold_out", "fold"):
            if (value := getattr(config, key)) is not None:
                raise ValueError(f"{root} has {val_folder.name}/, so leave data.{key}={value} out")
        classes = _classes_in(train_folder)
        train, evaluate = _files(train_folder, classes, None), _files(val_folder, classes, None)
    else:
        folder = train_folder if train_folder.is_dir() else root
        classes = _classes_in(folder)
        found = _files(folder, classes, group)
        sides = split_items([record.item for record in found], config, source=str(root))
        train, evaluate = ([found[index] for index in side] for side in (sides.train, sides.evaluate))
        train_folder = val_folder = folder
    kind = kind_of_files(train[0].files, channels, dtype)
    mean, std = normalization_of(kind)
    one, other = Files(train, kind, train_folder), Files(evaluate, kind, val_folder)
    return Dataset(one, other, classes, kind.channels, mean, std, in_memory=False, dtype=kind.dtype)


def _existing(path: str | None) -> Path:
    if path is None:
        raise ValueError("data.name=imagefolder reads a folder and data.path is not set; add data.path=DIR")
    root = Path(path)
    if not root.is_dir():
        beside = [entry.name for entry in root.parent.iterdir() if entry.is_dir()] if root.parent.is_dir() else []
        raise ValueError(f"data.path is {path} and there is no such folder{did_you_mean(root.name, beside)}")
    return root


def _classes_in(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} holds no class folders; images go into {folder}/CLASS/image.jpg")
    return classes


def _files(folder: Path, classes: list[str], group: str | None) -> list[FileRecord]:
    """All images of `classes` below `folder`.  ValueError: a class without images, or a folder that is no class."""
    extra = sorted(set(_classes_in(folder)) - set(classes))
    if extra:
        hint = did_you_mean(extra[0], classes)
        raise ValueError(f"{folder} has the class '{extra[0]}', which train/ lacks{hint} Move or rename that folder")
    records: list[FileRecord] = []
    for label, name in enumerate(classes):
        found = sorted(_images_below(folder / name, folder))
        if not found:
            raise ValueError(
                f"the class '{name}' is empty: {folder / name} holds no image ({', '.join(SUFFIXES)}); "
                "add some or remove the folder"
            )
        records += [
            FileRecord((folder / path,), Known(label), Item(path, stratum=name, group=group_in(path, group))) for path in found
        ]
    return records


def _images_below(folder: Path, root: Path) -> list[str]:
    """The paths of the images below a folder, following links.  ValueError: a link leads in a circle."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                _refuse_circle(Path(place, name), folder)
        found += [os.path.relpath(os.path.join(place, name), root) for name in names if name.lower().endswith(SUFFIXES)]
    return found


def _refuse_circle(link: Path, folder: Path) -> None:
    """ValueError: a link leads to a folder that contains it, on the way from `folder` or above that."""
    came_through = [place.resolve() for place in link.parents if place.is_relative_to(folder)]
    if link.resolve() in (*came_through, *folder.resolve().parents):
        raise ValueError(
            f"data.path leads in a circle: {link} is a link to {link.resolve()}, in which it lies, so the same images would be "
            "read again and again; remove the link"
        )


def _sample_folder(place: Path, write: Callable[[Path], None]) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                write(place / split / name / f"{number}{SUFFIXES[number]}")
    return place


CASES = [({"path": _sample_folder}, 6, 4, 2)]
"""As in digits.py; a callable `path` makes the folder: `path(place, write)`, where write(path) saves an image."""
