"""The classes of masks: from `data.options.classes`, a file of them, or the numbers in the masks."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from widefield.data.masks import Array, Coding, mask_size, raw_mask, reads_windows
from widefield.geometry.box import full_box
from widefield.geometry.interval import Interval, pieces_of

BAND = 1024
"""Rows, or planes, of a mask that are looked at together."""
MOST_FOUND = 256
"""Numbers in masks above this are taken for numbers of objects, unless classes are given."""


def coding_of(given: Any, ignore: Any, numbers: Callable[[], set[int]], *, folder: Path) -> tuple[Coding, str]:
    """Which stored number means which class, and where that is known from, in words.

    given: None, a list of names (0, 1, ...), a mapping of names to numbers or to [red, green, blue], or the path of a file.
    ignore: the number or colour of pixels that do not count; None: 255, where no class has it.
    numbers: reads the masks for the numbers in them, where these are not given, or 255 might be a class; see `numbers_in`.
    ValueError: classes or ignore of another form, or numbers in masks that need classes.
    """
    if isinstance(given, str):
        given = _classes_in(folder / given if not Path(given).is_file() else Path(given))
    ignored = None if ignore is None else _number_of("ignore", ignore)
    if given is None:
        return _found(numbers(), ignored)
    if isinstance(given, Sequence):
        names = [str(name) for name in given]
        if len(names) == 2 and ignore is None and numbers() <= {0, 255}:
            return _coding({names[0]: 0, names[1]: 255}, None, False), "0 and 255 in masks are the two classes"
        return _coding(dict(zip(names, range(len(names)), strict=True)), ignored, False), "numbers in the order of the names"
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"data.options.classes is {given!r}; give names, or names with numbers or colours")
    kinds = {isinstance(value, int) for value in given.values()}
    if len(kinds) > 1 or isinstance(ignore, int) and kinds == {False}:
        raise ValueError("data.options.classes and ignore have numbers and colours; give all of them one or the other")
    stored = {str(name): _number_of(f"classes.{name}", value) for name, value in given.items()}
    return _coding(stored, ignored, colours=kinds == {False}), "as given"


def _coding(stored: Mapping[str, int], ignored: int | None, colours: bool) -> Coding:
    if len(set(stored.values())) < len(stored) or ignored in stored.values():
        raise ValueError("data.options.classes and ignore have two of the same number or colour; give each its own")
    default = set() if colours or 255 in stored.values() else {255}
    number_of = {number: place for place, number in enumerate(stored.values())}
    return Coding(tuple(stored), number_of, frozenset(default if ignored is None else {ignored}), colours)


def _number_of(key: str, value: Any) -> int:
    """A stored number; of a colour as raw_mask has it.  ValueError: it is neither."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, Sequence) and len(value) == 3 and all(type(one) is int and 0 <= one <= 255 for one in value):
        red, green, blue = value
        return red * 65536 + green * 256 + blue
    raise ValueError(f"data.options.{key} is {value!r}; give a number, or a colour as [255, 0, 0]")


def numbers_in(masks: Sequence[Path]) -> set[int]:
    """All stored numbers; of masks whose windows are read alone, a band of rows at a time."""
    return {number for mask in masks for part in _in_bands(mask) for number in np.unique(part).tolist()}


def _in_bands(mask: Path) -> Iterator[Array]:
    if mask.suffix.lower() == ".npy" or not reads_windows(mask):
        yield raw_mask(mask)
        return
    height, *others = mask_size(mask)
    for rows in pieces_of(Interval(0, height), BAND):
        yield raw_mask(mask, window=(rows, *full_box(others)))


def _found(numbers: set[int], ignored: int | None) -> tuple[Coding, str]:
    """Classes by the numbers in the masks."""
    numbers = numbers - {ignored}  # type: ignore[arg-type]
    if numbers <= {0, 255} and len(numbers) == 2 and ignored is None:
        return _coding({"background": 0, "foreground": 255}, None, False), "0 and 255 in masks are background and foreground"
    highest = max(numbers - {255} if ignored is None else numbers, default=0)
    if highest > MOST_FOUND or min(numbers, default=0) < 0:
        odd = max(numbers, key=abs)
        raise ValueError(
            f"masks have the number {odd}, which looks like the number of an object and not of a class; give "
            "data.options.classes"
        )
    names = {str(number): number for number in range(highest + 1)}
    return _coding(names, ignored, False), f"0 to {highest} are found in masks"


def _classes_in(path: Path) -> Any:
    """Classes in a file: names on lines, CSV of name and number, or name, red, green and blue; YAML or JSON as in a recipe."""
    if not path.is_file():
        raise ValueError(f"data.options.classes is {path} and there is no such file; name one, or list the classes")
    if path.suffix.lower() == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix.lower() in (".yaml", ".yml"):
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = [[cell.strip() for cell in row] for row in csv.reader(path.read_text(encoding="utf-8-sig").splitlines()) if row]
    if {len(row) for row in rows} == {1}:
        return [row[0] for row in rows]
    if rows and not rows[0][-1].isdigit():
        rows = rows[1:]  # the names of the columns
    try:
        return {row[0]: int(row[1]) if len(row) == 2 else [int(cell) for cell in row[1:]] for row in rows}
    except (ValueError, IndexError):
        raise ValueError(f"{path} has no classes; write a name on each line, with a number or red, green and blue") from None
