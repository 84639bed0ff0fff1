"""What is in a folder?  The format of its data, sizes, channels and dtype of its images, and how often each class is there."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset, open_dataset
from widefield.data.counts import label_counts
from widefield.data.image import SUFFIXES
from widefield.data.shards.patterns import has_tars

LOOKED_AT = 64
"""How many images are read, evenly over the training split."""
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
PAIRS = (("images", "masks"), ("images", "labels"), ("images", "annotations"), ("imagesTr", "labelsTr"))
"""Folders of images with their masks, in the folder itself or in train/."""
MASK_COLUMNS = ("mask", "masks", "mask_path")
"""Columns by which a CSV is one of masks."""


@dataclass(frozen=True)
class Look:
    """What was found.

    shapes: (C, H, W) of the images that were read.  counts: samples of each class or, of masks, pixels; [] of values.
    counted: the number of samples that `counts` are of.
    """

    data: DataConfig
    dataset: Dataset
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    counts: list[int]
    counted: int

    @property
    def same_size(self) -> bool:
        return len(set(self.shapes)) == 1

    @property
    def side(self) -> int:
        """The median of the shorter sides, in pixels."""
        sides = sorted(min(shape[1:]) for shape in self.shapes)
        return sides[len(sides) // 2]


def look_at(folder: Path) -> Look:
    """Look at a folder.  ValueError: it is not there, or has no images in a form that a format reads."""
    name, path = format_of(folder)
    data, dataset = _opened(name, str(path))
    images = dataset.train
    chosen = sorted({place * len(images) // LOOKED_AT for place in range(LOOKED_AT)})
    read = [images.read(index) for index in chosen]
    shapes = [tuple(image.shape) for image, _ in read]
    every = dataset.labels == "class" and hasattr(images, "target_of")
    targets = [images.target_of(index) for index in range(len(images))] if every else [target for _, target in read]
    counts = _counts(targets, dataset)
    return Look(data, dataset, shapes, read[0][0].dtype, counts, len(targets))


def format_of(folder: Path) -> tuple[str, Path]:
    """(the format, what it reads) of a folder.  ValueError: neither class folders, nor masks, a table or tars."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name a folder of images")
    if has_tars(folder):
        return "webdataset", folder
    places = (folder, folder / "train")
    if any((place / images).is_dir() and (place / masks).is_dir() for place in places for images, masks in PAIRS):
        return "masks", folder
    tables = sorted(file for file in folder.iterdir() if file.suffix.lower() in TABLES)
    if len(tables) == 1:
        return "masks" if _has_masks(tables[0]) else "manifest", tables[0]
    root = folder / "train" if (folder / "train").is_dir() else folder
    if any(_has_images(place) for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")):
        return "imagefolder", folder
    held = sorted(place.name + "/" * place.is_dir() for place in folder.iterdir())
    raise ValueError(
        f"{folder} has {', '.join(held[:5]) or 'nothing'}{' and more' if len(held) > 5 else ''}, and a folder to train on has "
        f"class folders (CLASS/image.jpg, also in train/ and val/), images/ and masks/, one table ({' or '.join(TABLES)}) "
        "of images and their labels, or tars of samples; sort the images into one of these"
    )


def _has_masks(table: Path) -> bool:
    """Whether a table of text has a column of masks."""
    if table.suffix == ".parquet":
        return False
    with table.open(encoding="utf-8-sig", errors="replace") as file:
        names = re.findall(r"[a-z_]+", file.readline().lower())
    return any(name in names for name in MASK_COLUMNS)


def _has_images(folder: Path) -> bool:
    return any(name.lower().endswith(SUFFIXES) for _, _, names in os.walk(folder, followlinks=True) for name in names)


def _opened(name: str, path: str) -> tuple[DataConfig, Dataset]:
    """The dataset, with a fifth held out (a tenth of many) where it has no evaluation split of its own."""
    try:
        config = DataConfig(name=name, path=path)
        return config, open_dataset(config)
    except ValueError:
        config = DataConfig(name=name, path=path, hold_out=0.2)
        dataset = open_dataset(config)
    if len(dataset.train) > 8000:
        config = DataConfig(name=name, path=path, hold_out=0.1)
        dataset = open_dataset(config)
    return config, dataset


def _counts(targets: list[int | Tensor], dataset: Dataset) -> list[int]:
    """How many samples have each class or, of class numbers of pixels, how many pixels."""
    if dataset.labels == "values":
        return []
    total: Counter[int] = Counter()
    for target in targets:
        total.update(label_counts(target, dataset.labels))
    return [total[number] for number in range(len(dataset.classes))]
