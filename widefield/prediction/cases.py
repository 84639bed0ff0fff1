"""The files of a case, CASE_0000 and so on, one per channel, as one input: for runs that were trained on such files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from widefield.data.windowed_files import name_of_image
from widefield.prediction.inputs import Input, Left


def by_case(images: Sequence[Input], channels: int) -> tuple[list[Input], list[Left]]:
    """Cases with their files in the order of channels, and what is left out: files of no case, and cases without a file.

    channels: of how many files a case is.  The answers of a case are filed under its name, without the number of a channel.
    Where a case is one file, a file without that number is one too, under its own name.
    """
    cases: dict[tuple[Path, str], dict[int, Input]] = {}
    lefts = []
    for image in images:
        case, number = _case_of(image, channels)
        if number is None:
            lefts.append(Left(str(image.path), _of_no_case(channels)))
            continue
        files = cases.setdefault((image.path.parent, case), {})
        if number in files:
            lefts.append(Left(str(image.path), f"{files[number].path} is of the same case and channel; remove one"))
            continue
        files[number] = image
    found = []
    for (_, case), files in cases.items():
        lost = [f"{number:04}" for number in range(channels) if number not in files]
        first = files[min(files)]
        if lost:
            lefts.append(
                Left(str(first.path), f"its case '{case}' lacks the file {case}_{lost[0]} of channel {int(lost[0])}; add it")
            )
            continue
        paths = tuple(files[number].path for number in range(channels))
        found.append(replace(first, name=first.name.with_name(case), files=paths))
    return found, lefts


def _case_of(image: Input, channels: int) -> tuple[str, int | None]:
    """The name of the case, and the number of the channel; None where the file has none of the run's."""
    name = name_of_image(image.path).name
    case, _, number = name.rpartition("_")
    if case and len(number) == 4 and number.isdigit() and int(number) < channels:
        return case, int(number)
    return image.name.name, 0 if channels == 1 else None


def _of_no_case(channels: int) -> str:
    last = f"_{channels - 1:04}"
    return f"this run was trained on nnU-Net's files, one per channel, whose names end in _0000 to {last}; rename it"
