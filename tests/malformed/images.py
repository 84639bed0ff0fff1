"""Images and masks of every format whose examples can be written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from widefield.image_files import open_image
from widefield.naming import load

from ..damaged_reads import outcome
from ..image_examples import CASES, pixels_of
from .mutation import damaged_bytes
from .trial import Refused, Subject

WEIGHT = 0.5
"""Of one example; there are some sixty."""


def image_subjects(place: Path) -> list[Subject]:
    found = []
    for number, (name, file, shape, dtype) in enumerate(CASES):
        folder = place / f"image {number} {name}"
        folder.mkdir()
        load("widefield.image_files.formats", name).write_example(folder / file, pixels_of(shape, dtype))
        files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file() and one.stat().st_size)
        with open_image(folder / file) as image:
            whole = image.read()
        read = partial(_image, file, whole)
        found += [Subject(f"image, {name}", folder, {one: damaged_bytes}, read, weight=WEIGHT / len(files)) for one in files]
    return found


def _image(file: str, whole: object, folder: Path) -> None:
    became = outcome(folder / file, whole, is_cut=False)
    assert not became.startswith("wrong"), became
    if became == "refused":
        raise Refused
