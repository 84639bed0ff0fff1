"""Reads damaged copies of image files, one after the other, and says what became of each; see image_files/test_damage.py.

    python tests/damaged_reads.py EXAMPLES FIRST SEED

EXAMPLES: a folder with a folder for each example, which has the image as the one whose name is in `name.txt`.
FIRST: the number of the first damage that is tried; a process that dies is started again behind what it died of.
SEED: of where and how files are damaged.
Each damage is a line "begin NUMBER WHAT" and then a line "end NUMBER OUTCOME".
"""

from __future__ import annotations

import logging
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from widefield.data import BadImageError
from widefield.data.image import read_image
from widefield.data.pixel_files import SUFFIXES
from widefield.image_files import open_image
from widefield.image_files.image_file import ImageFileError

KINDS = (
    "cut in its first 512 bytes", "cut in its first half", "cut in its second half", "without its last byte",
    "flipped in its first 256 bytes", "flipped in its last 256 bytes", "flipped anywhere", "zeros in its first 256 bytes",
    "zeros anywhere",
)  # fmt: skip
SECONDS = 30
"""A read that takes longer hangs: the files have some thousand pixels."""
ADDRESS_BYTES = 16 * 2**30
"""What a header may ask for before it is refused memory."""


def damaged(content: bytes, kind: str, random: np.random.Generator) -> bytes:
    """The same bytes always, of one state of `random`."""
    size, changed = len(content), bytearray(content)
    if kind.startswith("cut"):
        part = {"first 512 bytes": (0, min(512, size)), "first half": (0, size // 2), "second half": (size // 2, size)}
        low, high = part[kind.removeprefix("cut in its ")]
        return content[: int(random.integers(low, max(low + 1, high)))]
    if kind.startswith("without"):
        return content[:-1]
    low, high = {"first": (0, 256), "last ": (size - 256, size)}.get(kind.partition("in its ")[2][:5], (0, size))
    low, high = max(0, low), min(size, high)
    if kind.startswith("zeros"):
        start = int(random.integers(low, max(low + 1, high)))
        stop = min(high, start + int(random.integers(8, 129)))
        changed[start:stop] = bytes(stop - start)
    else:
        for _ in range(int(random.integers(1, 9))):
            changed[int(random.integers(low, high))] ^= int(random.integers(1, 256))
    return bytes(changed)


def outcome(path: Path, whole: np.ndarray, *, is_cut: bool) -> str:
    """What is wrong with how a damaged file is read; "refused", "read" or "as before" where nothing is."""
    found = None
    try:
        with open_image(path) as image:
            found = image.read()
            if found.shape != image.info.shape or found.dtype != image.info.dtype:
                return f"wrong: {found.shape} {found.dtype} where the header says {image.info.shape} {image.info.dtype}"
    except ImageFileError as error:
        if str(path) not in str(error) and str(path.parent) not in str(error):
            return f"wrong: an error that does not name the file: {error}"
    if path.name.lower().endswith(SUFFIXES):
        try:
            read_image(path)
        except BadImageError as error:
            if str(path) not in str(error) and str(path.parent) not in str(error):
                return f"wrong: an error of read_image that does not name the file: {error}"
    if found is None:
        return "refused"
    same = (
        found.shape == whole.shape
        and found.dtype == whole.dtype
        and np.array_equal(found, whole, equal_nan=found.dtype.kind == "f")
    )
    if is_cut and not same:
        return "wrong: bytes are missing, and other pixels were read in silence"
    return "as before" if same else "read"


def main(place: Path, first: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    for number, folder in enumerate(sorted(one for one in place.iterdir() if one.is_dir())):
        if (number + 1) * len(KINDS) <= first:
            continue
        name = (folder / "name.txt").read_text()
        with open_image(folder / name) as image:
            whole = image.read()
        for kind_number, kind in enumerate(KINDS):
            at = number * len(KINDS) + kind_number
            if at >= first:
                _try(folder, name, whole, kind, at, seed)


def _try(folder: Path, name: str, whole: np.ndarray, kind: str, at: int, seed: int) -> None:
    random = np.random.default_rng([seed, at])
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        files = sorted(one for one in Path(place).rglob("*") if one.is_file() and one.name != "name.txt" and one.stat().st_size)
        target = files[int(random.integers(len(files)))]
        print(f"begin {at} {folder.name}/{target.relative_to(place)} {kind}", flush=True)
        target.write_bytes(damaged(target.read_bytes(), kind, random))
        signal.alarm(SECONDS)
        try:
            became = outcome(Path(place, name), whole, is_cut="cut" in kind or "without" in kind)
        except Exception as error:
            became = f"wrong: {type(error).__module__}.{type(error).__name__}: {error}"
        signal.alarm(0)
    print(f"end {at} {' '.join(became.split())}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
