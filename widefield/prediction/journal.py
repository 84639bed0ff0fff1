"""The journal in a folder of predictions: which files there are ours, and which images are done.

    .predictions/about.json      the run, its weights and the options, which all answers in the folder share
    .predictions/names.jsonl     for each image, the name under which its answers are filed, before they are written
    .predictions/wide/NAME/      the labels of a large image, while it is predicted by window (raw_labels.py)
    .predictions/exact/NAME/     likewise those of the whole image, where blended windows are compared with them
    .predictions/done_R.jsonl    the images that rank R has answered for, with the answers

So a command that was stopped goes on where it was, and no file is overwritten that was not written by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from widefield.prediction.inputs import Input
from widefield.training.disk import replace_text
from widefield.trust import inside

PLACE = ".predictions"
TABLES = ("predictions.csv", "predictions.json")
COCO_RESULTS = "coco_results.json"
"""Of answers that are boxes."""
FilesOf = Callable[[Path, str], list[Path]]
Done = dict[str, Any]
"""`input`, its path as it was given; `place`, its absolute path; `stamp`, its size and time; `name`; `answer`."""


@dataclass
class Journal:
    """folder: of the answers.  names: by absolute path of an image.  done: likewise, with the stamp that the image had.

    suffixes: of the files of labels, by absolute path.
    """

    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    suffixes: dict[str, str] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)

    def is_done(self, image: Input) -> bool:
        found = self.done.get(key_of(image.path))
        return found is not None and found.get("stamp") == stamp_of(image.path)

    def add(self, image: Input, answer: Mapping[str, Any], *, rank: int) -> None:
        """Note that an image is done.  Each rank has a file of its own."""
        place = key_of(image.path)
        line: Done = {"input": str(image.path), "place": place, "stamp": stamp_of(image.path), "name": str(image.name)}
        self.done[place] = line = {**line, "answer": answer}
        _append(self.folder / PLACE / f"done_{rank}.jsonl", [line])

    def in_order(self) -> list[Done]:
        """All that is done, in the order in which images were first asked about."""
        return [self.done[path] for path in self.names if path in self.done]


def key_of(path: Path) -> str:
    return os.path.abspath(path)


def stamp_of(path: Path) -> list[int] | None:
    """Size and time of change; None where there is no such file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return [about.st_size, about.st_mtime_ns]


def read_journal(folder: Path) -> Journal:
    """What the journal in a folder says; nothing where there is none.  Lines that a kill left incomplete are skipped."""
    journal = Journal(folder)
    for line in _lines(folder / PLACE / "names.jsonl"):
        journal.names[str(line.get("place"))] = str(line.get("name"))
        journal.suffixes[str(line.get("place"))] = str(line.get("suffix", ".png"))
    for file in sorted((folder / PLACE).glob("done_*.jsonl")):
        for line in _lines(file):
            if isinstance(line.get("answer"), dict):
                journal.done[str(line.get("place"))] = line
    return journal


def begin(
    folder: Path,
    about: Mapping[str, Any],
    images: Sequence[Input],
    *,
    files_of: FilesOf,
    overwrite: bool = False,
) -> tuple[Journal, list[Input]]:
    """Open the journal of a folder, or begin one; returns it, and the images with the names under which answers are filed.

    files_of: from a name and the suffix of labels, the paths below the folder that will be written for it.
    overwrite: forget the answers that the folder has, and replace their files.
    ValueError, with nothing changed: the folder has answers of other weights or options, or files that were not written by this
    command and would be overwritten; or it cannot be written to.
    """
    is_ours = (folder / PLACE / "about.json").is_file()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; name a folder, which is made if it is not there")
    journal = read_journal(folder) if is_ours else Journal(folder)
    if is_ours and not overwrite:
        _check_about(folder, about)
    named = _named(images, journal)
    _check_free(folder, named, journal, files_of, tables_are_ours=is_ours)
    try:
        (folder / PLACE).mkdir(parents=True, exist_ok=True)
        if overwrite:
            for file in (folder / PLACE).glob("done_*.jsonl"):
                file.unlink()
            journal.done.clear()
        replace_text(folder / PLACE / "about.json", json.dumps(about, indent=1) + "\n")
        new = [image for image in named if key_of(image.path) not in journal.names]
        lines = [{"place": key_of(image.path), "name": str(image.name), "suffix": image.suffix} for image in new]
        _append(folder / PLACE / "names.jsonl", lines)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error}); name another --output") from None
    journal.names |= {key_of(image.path): str(image.name) for image in new}
    journal.suffixes |= {key_of(image.path): image.suffix for image in new}
    return journal, named


def _check_about(folder: Path, about: Mapping[str, Any]) -> None:
    try:
        before = json.loads((folder / PLACE / "about.json").read_text(encoding="utf-8"))
        differ = [key for key in about if before.get(key) != json.loads(json.dumps(about[key]))]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / PLACE / 'about.json'} is damaged ({error}); name another --output") from None
    if differ:
        key = differ[0]
        raise ValueError(
            f"{folder} has predictions with {key}={before.get(key)}, and now it is {about[key]}; add --overwrite to replace "
            "them, or name another --output"
        )


def _named(images: Sequence[Input], journal: Journal) -> list[Input]:
    """The images with the names that the journal has for them, or their own where no other image has that.

    ValueError: the name of an image is another one's.
    """
    taken = {name: path for path, name in journal.names.items()}
    found = []
    for image in images:
        key = key_of(image.path)
        name = Path(journal.names.get(key) or image.name)
        if taken.get(str(name), key) != key:
            name = image.name.with_name(image.path.name)
        if taken.setdefault(str(name), key) != key:
            raise ValueError(
                f"the answers to {image.path} and to {taken[str(name)]} would both be filed as {name}; name another --output "
                "for one of them"
            )
        found.append(replace(image, name=name))
    return found


def _check_free(
    folder: Path,
    images: Sequence[Input],
    journal: Journal,
    files_of: FilesOf,
    *,
    tables_are_ours: bool,
) -> None:
    """ValueError: a file would be overwritten that is not ours, or two answers would be one file."""
    ours = {file for place, name in journal.names.items() for file in files_of(Path(name), journal.suffixes[place])}
    planned: dict[Path, Input] = {}
    for image in images:
        for file in files_of(image.name, image.suffix):
            other = planned.setdefault(file, image)
            if other is not image:
                raise ValueError(f"the answers to {other.path} and {image.path} would both be {file}; rename one of them")
            place = inside(folder, str(file))
            if file not in ours and place.exists():
                raise ValueError(_taken(place))
    for table in () if tables_are_ours else (*TABLES, COCO_RESULTS):
        if (folder / table).exists():
            raise ValueError(_taken(folder / table))


def _taken(place: Path) -> str:
    return f"{place} is there and was not written by a prediction, so it is not overwritten; name another --output, or move it"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for row in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append whole lines in one write; after a line that a kill left incomplete, on a new one."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("a+b") as file:
        if file.tell() and text:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
