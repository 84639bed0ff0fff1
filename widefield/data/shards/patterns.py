"""Which tars are meant: braces as `train-{0000..0146}.tar`, `*` and `?`, folders, single files, and lists of these."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from widefield.data.splits import EVALUATION, TEST, TRAINING
from widefield.naming import did_you_mean

SUFFIX = ".tar"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RUN = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
MOST_SHARDS = 1_000_000


def is_pattern(text: str) -> bool:
    """Whether a path stands for others."""
    return bool(_BRACES.search(text)) or glob.has_magic(text)


def expanded(pattern: str) -> list[str]:
    """What braces stand for, as in a shell; a pair without `,` or `..` stays as it is.

    >>> expanded("{train,val}-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    parts = _BRACES.split(pattern)  # text, inside of braces, text, ...
    choices = [[part] if number % 2 == 0 else _inside(part, pattern) for number, part in enumerate(parts)]
    return ["".join(one) for one in product(*choices)]


def _inside(braces: str, pattern: str) -> list[str]:
    run = _RUN.fullmatch(braces)
    if run is None:
        return braces.split(",") if "," in braces else [f"{{{braces}}}"]
    first, last, step = int(run[1]), int(run[2]), int(run[3] or 1)
    if last < first or step < 1 or (last - first) // step >= MOST_SHARDS:
        raise ValueError(f"{{{braces}}} in {pattern} counts from {first} to {last} by {step}; write the lower number first")
    is_padded = run[1].startswith("0") or run[2].startswith("0")
    width = max(len(run[1]), len(run[2])) if is_padded else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1, step)]


def shards_of(patterns: str | Sequence[str], folder: Path, *, option: str) -> list[Path]:
    """The tars that patterns stand for, relative to a folder, in their order; of one with `*`, and of a folder, by name.

    option: where the patterns are from, for errors.
    ValueError: a tar is not there, a pattern fits none, one is meant twice, or it is an address.
    """
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise ValueError(f"{option} is {patterns!r}; give a tar, a pattern as train-{{0000..0146}}.tar, or a list of them")
    texts = [(text, one) for one in listed for text in ([one] if (folder / one).exists() else expanded(one))]
    found = [path for text, one in texts for path in _paths(text, one, folder, option)]
    seen: dict[Path, Path] = {}
    for path in found:
        whole = path.resolve()
        if whole in seen:
            other = "" if seen[whole] == path else f" and {seen[whole]}, which is the same file,"
            raise ValueError(
                f"{option} names {path}{other} twice, so that its samples would be read twice an epoch; name it once"
            )
        seen[whole] = path
    return found


def _paths(text: str, pattern: str, folder: Path, option: str) -> Iterator[Path]:
    if re.match(r"[a-z0-9]+://|pipe:", text):
        raise ValueError(
            f"{option} is {text}, and shards are files here; copy them, or mount where they lie, and name the files"
        )
    path = folder / text
    if path.is_dir():
        yield from tars_below(path)
    elif glob.has_magic(text) and not path.exists():
        some = sorted(Path(one) for one in glob.glob(os.path.join(glob.escape(str(folder)), text)))
        if not some:
            raise ValueError(f"{option} is {pattern}, and no file in {path.parent} is of that name{_near(path)}")
        yield from some
    elif path.is_file():
        yield path
    else:
        raise ValueError(f"{option} is {pattern}, and there is no file {path}{_near(path)}")


def _near(path: Path) -> str:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, beside)


def tars_below(folder: Path) -> list[Path]:
    """Those in a folder and the folders in it, by name.  ValueError: there is none."""
    found, packed = [], []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
        packed += [Path(place, name) for name in names if name.endswith(_COMPRESSED)]
    if packed:
        raise ValueError(
            f"{min(packed)} is compressed, so that a sample is reached only through all that lie before it; unpack the "
            f"{len(packed)} such tars once, as by gunzip: images are compressed already, so they will hardly grow"
        )
    if not found:
        raise ValueError(f"{folder} has no {SUFFIX} file; shards are named as train-0000.tar")
    return sorted(found)


def has_tars(folder: Path) -> bool:
    """Whether a folder, or its train/, has a tar."""
    places = (folder, *(folder / word for word in TRAINING))
    return any(entry.suffix == SUFFIX for place in places if place.is_dir() for entry in place.iterdir())


def is_shards(path: Path) -> bool:
    """Whether a path is a tar, or a pattern of tars, or a folder that has some."""
    return path.name.endswith(SUFFIX) or (path.is_dir() and has_tars(path))


def sides_by_name(shards: Sequence[Path], root: Path) -> tuple[list[Path], list[Path], int] | None:
    """Shards to train on, to evaluate, and how many are on neither side, by the words in their names below `root`.

    Those of a test split are evaluated where there is no other.  None: no name says a side.
    ValueError: some say one and others do not, or one says two.
    """
    sides: dict[str, list[Path]] = {"train": [], "val": [], "test": [], "": []}
    for path in shards:
        words = set(re.split(r"[^a-z]+", os.path.relpath(path, root).lower()))
        said = [name for name, some in zip(sides, (TRAINING, EVALUATION, TEST), strict=False) if words & set(some)]
        if len(said) > 1:
            raise ValueError(f"{path} has {' and '.join(said)} in its name; say data.options.train and data.options.val")
        sides[said[0] if said else ""].append(path)
    if not any(sides[name] for name in ("train", "val", "test")) or not (sides["val"] or sides["test"]):
        return None
    if sides[""] or not sides["train"]:
        odd = sides[""][0] if sides[""] else shards[0]
        raise ValueError(
            f"the name of {odd} does not say whether it is to train on, and those of others say that they are to evaluate; say "
            "data.options.train and data.options.val"
        )
    if sides["val"]:
        return sides["train"], sides["val"], len(sides["test"])
    return sides["train"], sides["test"], 0
