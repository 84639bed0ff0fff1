"""Which class is a label?  Numbers stay what they are; names are numbered by the alphabet, or in the order that is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widefield.data.shards.labels import LabelWords
from widefield.naming import did_you_mean

Array = np.ndarray[Any, Any]
NameOf = Callable[[int], object]
"""Of a sample, for errors."""
MOST_CLASSES = 100_000
"""Numbers above it are taken for those of objects, unless classes are given; ImageNet-22K has 21,841."""
TEXTS = 200
"""More different labels than these, of more than half of the samples, are taken for texts."""


def classes_of(words: LabelWords, given: Any, *, train: int | None, name_of: NameOf, folder: Path) -> tuple[list[str], Array]:
    """The names of the classes, and the class number of each word.

    given: names in the order of their numbers, or a file with a name on each line, below `folder`; None: as found.
    train: how many of the first samples are to train on; None: it is not known yet.
    ValueError: a label that is no class, with a sample that has it.
    """
    is_number = [word.isascii() and word.isdigit() for word in words.words]
    if given is not None:
        return _given(words, _names(given, folder), all(is_number), name_of)
    if not words.words:
        raise ValueError(f"no sample has a label, from {name_of(0)} on; mend them, or name another member or key")
    if all(is_number):
        numbers = np.array([int(word) for word in words.words], dtype=np.int64)
        highest = int(numbers.argmax())
        if numbers[highest] >= MOST_CLASSES:
            raise ValueError(
                f"{name_of(words.with_word(highest))} has the label {numbers[highest]}, which looks like the number of an "
                "object and not of a class; give data.options.classes"
            )
        return [str(number) for number in range(int(numbers[highest]) + 1)], numbers
    return _named(words, is_number, train, name_of)


def _named(words: LabelWords, is_number: list[bool], train: int | None, name_of: NameOf) -> tuple[list[str], Array]:
    if any(is_number):
        number, name = is_number.index(True), is_number.index(False)
        raise ValueError(
            f"labels are numbers and names: {words.words[number]} of {name_of(words.with_word(number))} and "
            f"{words.words[name]} of {name_of(words.with_word(name))}; mend them, or give data.options.classes"
        )
    if len(words.words) > TEXTS and len(words.words) > len(words.ends) / 2:
        raise ValueError(
            f"there are {len(words.words):,} different labels in {len(words.ends):,} samples, so they look like texts and not "
            f"like classes, as {words.words[0][:60]!r} of {name_of(words.with_word(0))}; name another member or key"
        )
    names = sorted(words.words)
    if train is not None:
        known = np.unique(words.codes[: words.ends[train - 1]])
        extra = sorted(set(range(len(words.words))) - set(known.tolist()))
        if extra:
            raise ValueError(
                f"{name_of(words.with_word(extra[0]))} has the class '{words.words[extra[0]]}', which no sample to train on has"
                f"{did_you_mean(words.words[extra[0]], [words.words[code] for code in known])} Give data.options.classes to "
                "keep it"
            )
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[word] for word in words.words], dtype=np.int64)


def _given(words: LabelWords, names: list[str], are_numbers: bool, name_of: NameOf) -> tuple[list[str], Array]:
    place = {name: number for number, name in enumerate(names)}
    unknown = [code for code, word in enumerate(words.words) if word not in place]
    if not unknown:
        return names, np.array([place[word] for word in words.words], dtype=np.int64)
    if are_numbers and not set(words.words) & set(names):
        numbers = np.array([int(word) for word in words.words], dtype=np.int64)
        unknown = np.flatnonzero(numbers >= len(names)).tolist()
        if not unknown:
            return names, numbers
    word = words.words[unknown[0]]
    raise ValueError(
        f"{name_of(words.with_word(unknown[0]))} has the label {word}, and data.options.classes has {len(names)} names and no "
        f"such one{did_you_mean(word, names)} Add it, or mend the label"
    )


def _names(given: Any, folder: Path) -> list[str]:
    if isinstance(given, str):
        path = folder / given
        if not path.is_file():
            raise ValueError(f"data.options.classes is {given} and there is no file {path}; name one, or list the classes")
        given = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"data.options.classes is {given!r}; give names in the order of their numbers, or a file of them")
    names = [str(name) for name in given]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"data.options.classes has '{twice}' twice; give each class a name of its own")
    return names


def values_of(words: LabelWords, columns: Sequence[str], name_of: NameOf) -> Array:
    """(samples, columns) float64.  ValueError: a label is no finite number."""
    numbers = np.empty(len(words.words), dtype=np.float64)
    for code, word in enumerate(words.words):
        try:
            numbers[code] = float(word)
        except ValueError:
            numbers[code] = math.nan
        if not math.isfinite(numbers[code]):
            raise ValueError(
                f"{name_of(words.with_word(code))} has the value {word!r:.60}; a finite number is wanted, so mend it"
            )
    return numbers[words.codes].reshape(len(words.ends), len(columns))
