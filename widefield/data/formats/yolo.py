"""Boxes in text files, as Ultralytics has them: data.yaml names folders of images; labels/a.txt belongs to images/a.png.

data.yaml:  path: ..., train: images/train, val: images/val, names: {0: cat, 1: dog}
labels/train/a.txt:  a line per box: class, center x, center y, width, height, as shares of the image's width and height

A line with an outline in place of a box, class x y x y ..., is the box about it.  An image without its text file has no boxes.
A folder may be one, or several in a list, or a text file with a path of an image on each line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset
from widefield.data.image import size_of
from widefield.data.mask_layouts import files_below
from widefield.data.pixel_files import SUFFIXES
from widefield.data.records import FileRecord, dataset_of_records
from widefield.data.splits import Item, group_in
from widefield.detection.targets import rows_of
from widefield.geometry import Interval


@dataclass(frozen=True)
class YoloBoxes:
    """A target: the boxes of `labels`, a text file that may be missing, in pixels of `image`."""

    labels: Path
    image: Path

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        """(N, 7).  BadImageError: a line is none, or the image cannot be read."""
        if not self.labels.is_file():
            return rows_of([], [])
        height, width = size_of(self.image)[-2:]
        lines = self.labels.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [_numbers(line, self.labels, number) for number, line in enumerate(lines, start=1) if line.strip()]
        shares = [_box(values) for values in rows]
        boxes = [(x1 * width, y1 * height, x2 * width, y2 * height) for x1, y1, x2, y2 in shares]
        return rows_of(boxes, [values[0] for values in rows])


def _numbers(line: str, file: Path, number: int) -> list[float]:
    try:
        values = [float(word) for word in line.split()]
    except ValueError:
        values = []
    if len(values) < 5 or len(values) % 2 == 0 or not all(map(math.isfinite, values)):
        raise BadImageError(
            f"line {number} of {file} is {line.strip()[:60]!r}; class, center x, center y, width, height are wanted, or class "
            "and an outline x y x y x y"
        )
    return values


def _box(values: list[float]) -> tuple[float, ...]:
    """x1, y1, x2, y2 as shares of the image."""
    if len(values) == 5:
        x, y, width, height = values[1:]
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    xs, ys = values[1::2], values[2::2]
    return min(xs), min(ys), max(xs), max(ys)


def open_dataset(config: DataConfig, *, channels: int | None = None, group: str | None = None) -> Dataset:
    """channels: None: those of the first image.  group: a regular expression whose match in a path is the group.

    ValueError, which names the file: no data.yaml, or one without classes or folders.
    """
    file = _description(config)
    tree = _tree(file)
    root = (file.parent / str(tree.get("path") or ".")).resolve()
    if not root.is_dir():
        root = file.parent  # as of a data set that was moved
    names = _names(tree, file)
    for key in ("hold_out", "fold"):
        if tree.get("val") and getattr(config, key) is not None:
            raise ValueError(f"{file} says what to train on and to evaluate, so leave data.{key}={getattr(config, key)} out")
    sides = [_records(root, tree.get(key), file, group) for key in ("train", "val") if tree.get(key)]
    train = sides[0] if len(sides) == 2 else None
    about: dict[str, Any] = {"classes": names, "labels": "boxes", "channels": channels, "dtype": None, "train": train}
    return dataset_of_records(sides[-1], config, source=str(file), **about)


def _description(config: DataConfig) -> Path:
    """The data.yaml."""
    path = None if config.path is None else Path(config.path)
    if path is not None and path.is_dir():
        path = next((path / name for name in ("data.yaml", "data.yml", "dataset.yaml") if (path / name).is_file()), path)
    if path is None or not path.is_file():
        raise ValueError(f"data.path is {config.path}, and data.name=yolo reads a data.yaml, or a folder with one; name it")
    return path


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read as YAML ({error}); mend it") from None
    if not isinstance(tree, dict) or not tree.get("train"):
        raise ValueError(f"{file} has no `train`, a folder of images; write train, val and names into it")
    return tree


def _names(tree: dict[str, Any], file: Path) -> list[str]:
    """The classes in the order of their numbers."""
    names = tree.get("names")
    if isinstance(names, dict) and sorted(names) == list(range(len(names))) and names:
        return [str(names[number]) for number in range(len(names))]
    if isinstance(names, list) and names:
        return [str(name) for name in names]
    raise ValueError(f"{file} has the names {names!r}; a name for each class is wanted, numbered from 0")


def _records(root: Path, where: Any, file: Path, group: str | None) -> list[FileRecord]:
    places = [root / str(one) for one in (where if isinstance(where, list) else [where])]
    images: list[Path] = []
    for place in places:
        if place.is_dir():
            images += files_below(place, SUFFIXES).values()
        elif place.suffix == ".txt" and place.is_file():
            lines = place.read_text(encoding="utf-8").splitlines()
            images += [(place.parent / line.strip()) for line in lines if line.strip()]
        else:
            raise ValueError(f"{file} names {place}, which is no folder of images and no list of them; mend it")
    return [
        FileRecord((image,), YoloBoxes(_labels_of(image), image), Item(str(image), group=group_in(str(image), group)))
        for image in images
    ]


def _labels_of(image: Path) -> Path:
    """labels/train/a.txt of images/train/a.png: the last folder of that name is another one."""
    parts = list(image.with_suffix(".txt").parts)
    places = [number for number, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts)


def _sample_yolo(place: Path, write: Callable[[Path], None]) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            write(place / "images" / split / f"{number}.png")
            labels = place / "labels" / split / f"{number}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text("0 0.5 0.5 0.5 0.25\n1 0.1 0.1 0.6 0.1 0.5 0.9\n" if number != 1 else "")
    (place / "data.yaml").write_text("train: images/train\nval: images/val\nnames: {0: a, 1: b}\n")
    return place


CASES = [({"path": _sample_yolo}, 4, 2, 2)]
"""As in imagefolder.py."""
