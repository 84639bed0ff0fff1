"""Which files are meant by the words of a command line, and under which names are their answers filed?

A word is a file, a folder (with all images below it), a pattern, or `@` and the name of a list with a word per line.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from widefield.data.image import SUFFIXES
from widefield.data.windowed_files import name_of_image
from widefield.image_files import is_image_file, is_series

TARS = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class Input:
    """An image file.  name: the relative path, without a suffix where that is clear, under which its answers are filed.

    suffix: of the file of its pixels' labels, or of its answer where that is an image.
    files: of a case with a file per channel, all of them, `path` first; empty of others.
    is_wide: whether it is predicted by window.
    """

    path: Path
    name: Path
    suffix: str = ".png"
    files: tuple[Path, ...] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class Left:
    """A file that was left out, or a word that means none, and why."""

    path: str
    reason: str


def find_inputs(
    words: Sequence[str | Path], *, beside: Path | None = None, volumes: bool = False
) -> tuple[list[Input], list[Left]]:
    """The files that `words` mean, each once, in their order, and the words that mean none.

    beside: a folder whose files are no inputs, where the answers go.  volumes: whether a folder of DICOM slices is one input.
    ValueError: the words mean no file at all.
    """
    lefts: list[Left] = []
    found: dict[Path, tuple[Path, Path]] = {}
    for word in words:
        for path, name in _meant_by(str(word), lefts, is_list=True, volumes=volumes):
            place = path.resolve()
            if beside is None or not place.is_relative_to(beside.resolve()):
                found.setdefault(place, (path, name))
    if not found:
        raise ValueError(_nothing(lefts))
    names = _distinct([name for _, name in found.values()], list(found))
    return [Input(path, name) for (path, _), name in zip(found.values(), names, strict=True)], lefts


def _nothing(lefts: Sequence[Left]) -> str:
    why = "".join(f"\n  {left.path}: {left.reason}" for left in lefts[:5])
    return f"no image was found{':' if why else ''}{why}\nname files, folders, patterns in quotes, or a list as @list.txt"


def _meant_by(word: str, lefts: list[Left], *, is_list: bool, volumes: bool) -> Iterator[tuple[Path, Path]]:
    path = Path(word)
    if path.is_dir() and _is_image_folder(path, volumes):
        yield path, Path(path.name)
    elif path.is_dir():
        files = sorted(_images_below(path, volumes))
        if not files:
            lefts.append(Left(word, f"the folder has no image ({', '.join(SUFFIXES)})"))
        yield from ((file, file.relative_to(path)) for file in files)
    elif path.is_file() and path.name.lower().endswith(TARS):
        why = "a tar, of whose samples data.name=webdataset makes a dataset, while files of images are predicted; unpack it"
        lefts.append(Left(word, f"{why}: mkdir samples && tar -xf {path.name} -C samples, and name that folder"))
    elif path.exists():
        yield path, Path(path.name)
    elif is_list and word.startswith("@"):
        yield from _listed(word, lefts, volumes)
    elif glob.has_magic(word):
        files = sorted(Path(file) for file in glob.glob(word, recursive=True) if os.path.isfile(file))
        if not files:
            lefts.append(Left(word, "no file fits the pattern"))
        start = Path(os.path.commonpath([file.parent for file in files])) if files else path
        yield from ((file, file.relative_to(start)) for file in files)
    else:
        lefts.append(Left(word, "there is no such file or folder"))


def _is_image_folder(path: Path, volumes: bool) -> bool:
    """As scene.zarr, or a folder of DICOM slices."""
    return is_image_file(path) or (volumes and is_series(path))


def _images_below(folder: Path, volumes: bool) -> Iterator[Path]:
    """The images in a folder and in those in it, but for what is inside of a folder that is an image."""
    for path in folder.iterdir():
        if path.is_dir() and not _is_image_folder(path, volumes):
            yield from _images_below(path, volumes)
        elif path.is_dir() or path.suffix.lower() in SUFFIXES or is_image_file(path):
            yield path


def _listed(word: str, lefts: list[Left], volumes: bool) -> Iterator[tuple[Path, Path]]:
    """What the lines of a list mean, seen from the working folder.  ValueError: it cannot be read."""
    try:
        lines = Path(word[1:]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the list {word[1:]} cannot be read as text ({error}); name a file with a path per line") from None
    for line in filter(None, map(str.strip, lines)):
        yield from _meant_by(line, lefts, is_list=False, volumes=volumes)


def _distinct(names: Sequence[Path], places: Sequence[Path]) -> list[Path]:
    """Distinct names: without suffix where no other has the same stem; from the common folder where that does not do."""
    stems = Counter(map(name_of_image, names))
    tries: list[Callable[[], list[Path]]] = [
        lambda: [name_of_image(name) if stems[name_of_image(name)] == 1 else name for name in names],
        lambda: list(names),
        lambda: [place.relative_to(os.path.commonpath([one.parent for one in places])) for place in places],
    ]
    return next(found for found in (make() for make in tries) if len(set(found)) == len(found))
