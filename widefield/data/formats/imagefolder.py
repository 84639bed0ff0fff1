"""Class folders, as ImageNet is commonly stored: `path/train/CLASS/image.jpg` and `path/val/CLASS/image.jpg`.

Without train/ and val/, `path/CLASS/image.jpg` is read and a share `data.hold_out` of it is held out for evaluation, chosen by
the names of the files.  Folders may be nested below a class, and be links to other folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.image import SUFFIXES, read_image
from widefield.naming import did_you_mean


@dataclass(frozen=True)
class Files:
    """Image files below `root`, as (relative path, class number), sorted."""

    root: Path
    entries: list[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> tuple[Tensor, int]:
        name, label = self.entries[index]
        return read_image(self.root / name, channels=3), label

    def name_of(self, index: int) -> str:
        return str(self.root / self.entries[index][0])


def open_dataset(config: DataConfig) -> Dataset:
    """RGB images in class folders.  ValueError: a missing or empty folder, an empty class, or a class that only val/ has."""
    root = _existing(config.path)
    train_folder = root / "train"
    val_folder = next((root / name for name in ("val", "validation", "test") if (root / name).is_dir()), None)
    if train_folder.is_dir() and val_folder is not None:
        if config.hold_out is not None:
            raise ValueError(f"{root} has {val_folder.name}/, so leave data.hold_out={config.hold_out} out")
        classes = _classes_in(train_folder)
        train, evaluate = _files(train_folder, classes), _files(val_folder, classes)
    else:
        folder = train_folder if train_folder.is_dir() else root
        classes = _classes_in(folder)
        train, evaluate = _split(_files(folder, classes), _share_of(config, root))
    # mean and std of ImageNet, which pretrained weights expect
    return Dataset(train, evaluate, classes, 3, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], in_memory=False)


def _existing(path: str | None) -> Path:
    if path is None:
        raise ValueError("data.name=imagefolder reads a folder and data.path is not set; add data.path=DIR")
    root = Path(path)
    if not root.is_dir():
        beside = [entry.name for entry in root.parent.iterdir() if entry.is_dir()] if root.parent.is_dir() else []
        raise ValueError(f"data.path is {path} and there is no such folder{did_you_mean(root.name, beside)}")
    return root


def _share_of(config: DataConfig, root: Path) -> float:
    if not config.hold_out:
        raise ValueError(
            f"{root} has no train/ and val/ folders, so nothing is held out for evaluation; "
            "add data.hold_out=0.1 to hold out a tenth of the images, or make the two folders"
        )
    return config.hold_out


def _classes_in(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} holds no class folders; images go into {folder}/CLASS/image.jpg")
    return classes


def _files(folder: Path, classes: list[str]) -> Files:
    """All images of `classes` below `folder`.  ValueError: a class without images, or a folder that is no class."""
    extra = sorted(set(_classes_in(folder)) - set(classes))
    if extra:
        hint = did_you_mean(extra[0], classes)
        raise ValueError(f"{folder} has the class '{extra[0]}', which train/ lacks{hint} Move or rename that folder")
    entries: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        found = sorted(_images_below(folder / name, folder))
        if not found:
            raise ValueError(
                f"the class '{name}' is empty: {folder / name} holds no image ({', '.join(SUFFIXES)}); "
                "add some or remove the folder"
            )
        entries += [(path, label) for path in found]
    return Files(folder, entries)


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


def _split(files: Files, share: float) -> tuple[Files, Files]:
    """Hold out the `share` of each class whose names have the lowest hashes; both sides get at least one image."""
    held: set[str] = set()
    for label in {label for _, label in files.entries}:
        names = sorted((name for name, its in files.entries if its == label), key=_hash)
        if len(names) < 2:
            raise ValueError(f"{files.root / names[0]} is its class's only image, so none can be held out; add images")
        held.update(names[: min(len(names) - 1, max(1, round(share * len(names))))])
    train = [entry for entry in files.entries if entry[0] not in held]
    return Files(files.root, train), Files(files.root, [entry for entry in files.entries if entry[0] in held])


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _sample_folder(place: Path, write: Callable[[Path], None]) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                write(place / split / name / f"{number}{SUFFIXES[number]}")
    return place


CASES = [({"path": _sample_folder}, 6, 4, 2)]
"""As in digits.py; a callable `path` makes the folder: `path(place, write)`, where write(path) saves an image."""
