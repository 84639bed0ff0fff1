"""Images in files with boxes that a format knows: what formats of boxes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.records import FileRecord, dataset_of_records
from widefield.data.splits import Item, group_in
from widefield.detection.targets import rows_of
from widefield.geometry import Interval


@dataclass(frozen=True)
class KnownBoxes:
    """A target of boxes: rows (N, 7), all of them whatever window is read."""

    rows: Tensor

    def read(self, window: tuple[Interval, ...] | None = None) -> Tensor:
        return self.rows


@dataclass(frozen=True)
class BoxedFile:
    """An image's file with its boxes, as x1, y1, x2, y2 in edges, their class numbers, crowds and areas (None: the boxes')."""

    file: Path
    boxes: tuple[tuple[float, ...], ...]
    labels: tuple[int, ...]
    crowd: tuple[bool, ...] | None = None
    area: tuple[float, ...] | None = None

    def record(self, group: str | None) -> FileRecord:
        """group: a regular expression whose match in the file's name is the group."""
        crowd = None if self.crowd is None else [float(one) for one in self.crowd]
        rows = rows_of(list(self.boxes), list(self.labels), crowd=crowd, area=None if self.area is None else list(self.area))
        return FileRecord((self.file,), KnownBoxes(rows), Item(str(self.file), group=group_in(str(self.file), group)))


def dataset_of_boxes(
    images: Sequence[BoxedFile],
    config: DataConfig,
    *,
    source: str,
    classes: list[str],
    train: Sequence[BoxedFile] | None,
    channels: int | None,
    group: str | None,
    more: Sequence[str] = (),
) -> Dataset:
    """train: where the format has a split, the images to train on, and `images` those to evaluate.  more: for the log.

    ValueError: no classes or no split, or data.hold_out or fold where there is one.
    """
    if not classes:
        raise ValueError(f"{source} names no class; boxes of one class or more are wanted")
    if train is not None:
        for key in ("hold_out", "fold"):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"{source} says what to train on and to evaluate, so leave data.{key}={getattr(config, key)} out"
                )
    sides = [[one.record(group) for one in side] for side in (images, train or ())]
    boxes = sum(len(one.labels) for side in (images, train or ()) for one in side)
    about: dict[str, Any] = {"source": source, "classes": classes, "labels": "boxes", "channels": channels, "dtype": None}
    return dataset_of_records(
        sides[0], config, **about, train=sides[1] if train is not None else None, more=[f"{boxes:,} boxes", *more]
    )


def first_file(places: Sequence[Path], what: str) -> Path:
    """The first of these that is a file.  ValueError, beginning with `what`: none is."""
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(f"{what} is in none of {', '.join(sorted({str(place.parent) for place in places}))}; put it there")
    return found
