"""Where images and their masks are, in the layouts that people use, paired by the stems of their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from widefield.data import masks
from widefield.data.pixel_files import SUFFIXES
from widefield.data.vector_masks import SUFFIXES as VECTORS
from widefield.data.vector_masks import UNREAD
from widefield.data.windowed_files import name_of_image
from widefield.image_files import is_image_file, is_series
from widefield.naming import did_you_mean

IMAGES = ("images", "image", "imgs", "img", "JPEGImages")
MASKS = ("masks", "mask", "labels", "label", "annotations", "annotation", "SegmentationClass")
TRAIN = ("train", "training")
VAL = ("val", "validation", "valid", "test")
ENDINGS = ("_mask", "_masks", "_label", "_labels", "-mask", "-label", "_gt", "_seg", "_segmentation")
"""What the stem of a mask may have after that of its image."""


@dataclass(frozen=True)
class Pair:
    """An image's files, one or one per channel, and its masks: one, or one per class with None where a class has none."""

    name: str
    images: tuple[Path, ...]
    masks: tuple[Path | None, ...]


@dataclass(frozen=True)
class Folders:
    """A folder of images and one of masks."""

    images: Path
    masks: Path


def find_folders(root: Path) -> tuple[Folders | None, Folders | None, Folders | None]:
    """The folders to train on, to evaluate, and those without a split.  ValueError: none are there."""
    images, labels = _first(root, IMAGES), _first(root, MASKS)
    if images and labels:
        inner = [_split_of(images, labels, names) for names in (TRAIN, VAL)]
        return (inner[0], inner[1], None) if inner[0] and inner[1] else (None, None, inner[0] or Folders(images, labels))
    outer = [_within(root, names) for names in (TRAIN, VAL)]
    if outer[0] and outer[1]:
        return outer[0], outer[1], None
    if outer[0]:
        return None, None, outer[0]
    have = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    missing = "masks" if images else "images"
    raise ValueError(
        f"{root} has no folder {missing}/; images go into {root}/images and masks into {root}/masks, or into train/images, "
        f"train/masks, val/images and val/masks. It has: {', '.join(have) or 'no folders'}{did_you_mean(missing, have)}"
    )


def _first(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _split_of(images: Path, labels: Path, names: Sequence[str]) -> Folders | None:
    """images/train and masks/train."""
    one, other = _first(images, names), _first(labels, names)
    return Folders(one, other) if one and other else None


def _within(root: Path, names: Sequence[str]) -> Folders | None:
    """train/images and train/masks."""
    folder = _first(root, names)
    one, other = (_first(folder, IMAGES), _first(folder, MASKS)) if folder else (None, None)
    return Folders(one, other) if one and other else None


def files_below(folder: Path, suffixes: Sequence[str], series: Callable[[str], bool] = lambda stem: False) -> dict[str, Path]:
    """Files by their path without suffix, relative to the folder, sorted.

    series: whether a folder of that path, relative to the folder, is one volume where it has DICOM slices.
    ValueError: two have the same path, or there is none.
    """
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder, followlinks=False):
        images = [name for name in folders if is_image_file(Path(name))]  # as scene.zarr
        for name in folders:
            whole = Path(place, name)
            if series(whole.relative_to(folder).as_posix()) and is_series(whole):
                found[whole.relative_to(folder).as_posix()] = whole
        taken = [path.name for path in found.values() if path.parent == Path(place)]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in (*images, *taken)]
        for name in (*names, *images):
            file = Path(place, name)
            if name.startswith(".") or not name.lower().endswith(tuple(suffixes)):
                continue
            stem = name_of_image(file.relative_to(folder)).as_posix()
            if stem in found:
                raise ValueError(
                    f"{found[stem]} and {file} have one stem, so it is not known which is meant; remove or rename one"
                )
            found[stem] = file
    if not found:
        raise ValueError(f"{folder} is empty: it has no file of {', '.join(suffixes)}; put some there, or name another folder")
    return dict(sorted(found.items()))


def pair(folders: Folders, *, ending: str | None, missing: str) -> tuple[list[Pair], int]:
    """Images with their masks by stem, and how many images without a mask were left out.

    ending: of the stems of masks, as _mask; None: any of the usual ones, or none.  missing: "stop", or "skip" such images.
    ValueError: an image without mask, a mask without image, or two for one.
    """
    labels = files_below(folders.masks, (*masks.SUFFIXES, *masks.LOSSY, *VECTORS, *UNREAD))
    endings = ("", *ENDINGS) if ending is None else (ending,)
    images = files_below(folders.images, SUFFIXES, lambda stem: any(stem + one in labels for one in endings))
    pairs, used, skipped = [], set(), 0
    for stem, image in images.items():
        stems = [stem + one for one in endings if stem + one in labels]
        if len(stems) > 1:
            raise ValueError(f"{image} has two masks, {labels[stems[0]]} and {labels[stems[1]]}; set data.options.ending")
        if not stems:
            skipped += _lacking(image, folders.masks, missing)
            continue
        used.add(stems[0])
        pairs.append(Pair(stem, (image,), (labels[stems[0]],)))
    _check_used(labels, used, folders)
    return _some(pairs, folders), skipped


def pair_layers(folders: Folders, classes: Sequence[str], *, missing: str) -> tuple[list[Pair], int]:
    """Images with one mask per class, from one folder per class.  missing: "stop", "skip" such images, or "empty" layers."""
    images = files_below(folders.images, SUFFIXES)
    layers = {name: files_below(folders.masks / name, (*masks.SUFFIXES, *masks.LOSSY)) for name in classes}
    pairs, skipped = [], 0
    for stem, image in images.items():
        files = tuple(layers[name].get(stem) for name in classes)
        lacks = [name for name, file in zip(classes, files, strict=True) if file is None]
        if lacks and missing != "empty":
            skipped += _lacking(image, folders.masks / lacks[0], missing)
            continue
        pairs.append(Pair(stem, (image,), files))
    for name in classes:
        _check_used(layers[name], set(images), Folders(folders.images, folders.masks / name))
    return _some(pairs, folders), skipped


def classes_of_folders(folders: Folders) -> list[str]:
    """The names of the classes where masks/ has one folder per class, which images/ has not; else none."""
    inner, others = (
        {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
        for folder in (folders.masks, folders.images)
    )
    return [] if inner & others else sorted(inner)


def _lacking(image: Path, where: Path, missing: str) -> int:
    if missing != "skip":
        raise ValueError(
            f"{image} has no mask: {where} has no file of its stem; add it, or set data.options.missing=skip to leave such "
            "images out"
        )
    return 1


def _check_used(labels: dict[str, Path], used: set[str], folders: Folders) -> None:
    lone = next((file for stem, file in labels.items() if stem not in used), None)
    if lone is not None:
        raise ValueError(f"the mask {lone} has no image of its stem in {folders.images}; add it, or remove the mask")


def _some(pairs: list[Pair], folders: Folders) -> list[Pair]:
    if not pairs:
        raise ValueError(f"no image in {folders.images} has a mask in {folders.masks}; name masks as their images")
    return pairs
