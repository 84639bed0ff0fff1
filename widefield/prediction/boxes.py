"""Answers that are boxes: for each image the file NAME.geojson, and for all of them coco_results.json.

coco_results.json is what COCO's evaluation reads: image_id is the number that the file's name is, or else that name without its
suffix; category_id is the data set's own number of the class, as in COCO's files, or else its place among the run's classes,
from 0, and category_name its name.
Boxes are those of the image as it is in its file, also where data.read_evaluate moves or resizes it.  GeoJSON has them in the
coordinates of the image's own system where the file has a place in the world, and else in pixels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.data.image import colours
from widefield.data.windowed_files import windowed
from widefield.image_files.image_file import ImageFileError
from widefield.outlines.geojson import Legend, write_outlines
from widefield.outlines.place import Georeference, place_of
from widefield.outlines.tracing import Outline
from widefield.prediction.inputs import Input
from widefield.prediction.journal import COCO_RESULTS, Done
from widefield.training.disk import replace_text

Boxes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class BoxFiles:
    """The file of each answer.  classes: their names."""

    classes: tuple[str, ...]

    def files_of(self, name: Path, suffix: str = "") -> list[Path]:
        """The path, below the folder of answers, of the boxes of the input of that name."""
        return [name.with_name(f"{name.name}.geojson")]

    def write(self, folder: Path, image: Input, boxes: Boxes, names: Sequence[str], scores: Sequence[float]) -> Path:
        """Write the boxes (x1, y1, x2, y2), whole or not at all; returns the path.  OSError: the disk refuses it."""
        path = folder / self.files_of(image.name)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name("." + path.name)
        legend = Legend(self.classes, tuple(colours(max(len(self.classes), 2))))
        regions = [_outline(*one, self.classes) for one in zip(boxes, names, scores, strict=True)]
        try:
            write_outlines(beside, regions, legend, _place(image.path))
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return path


def _outline(box: Sequence[float], name: str, score: float, classes: tuple[str, ...]) -> Outline:
    x1, y1, x2, y2 = box
    ring = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], dtype=np.float64)
    return Outline(classes.index(name), (ring,), {"score": score})


def _place(path: Path) -> Georeference | None:
    try:
        image = windowed(path)
    except (OSError, ImageFileError):
        return None
    return None if image is None else place_of(image.info)


def write_coco_results(folder: Path, done: Sequence[Done], ids: Mapping[str, int]) -> Path:
    """Write coco_results.json of all answers; returns its path.  ids: of classes, by name.  OSError: the disk refuses it."""
    rows: list[dict[str, Any]] = []
    for line in done:
        answer, stem = line["answer"], Path(line["name"]).name
        for box, name, score in zip(answer.get("boxes") or [], answer["classes"], answer["probabilities"], strict=True):
            x1, y1, x2, y2 = box
            rows.append({
                "image_id": int(stem) if stem.isdecimal() else stem, "category_id": ids[name],
                "category_name": name, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score,
            })  # fmt: skip
    path = folder / COCO_RESULTS
    replace_text(path, json.dumps(rows) + "\n")
    return path
