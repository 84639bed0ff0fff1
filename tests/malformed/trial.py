"""One malformed input: what became of it, and whether that is as it should be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from widefield.refusal import is_ours

SECONDS = 60
"""A read that takes longer hangs: the files are small.  A machine at a load of 10 is slow."""

Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Subject:
    """Something that is read.

    example: a folder with a sound one.  damage: by the name of a file in it, how that is damaged.
    read: reads it from a folder; what it returns must be right.  AssertionError: it is not.
    writes: names of files that it may write.  weight: how often it is drawn.  settle: after the damage, such as new hashes.
    """

    name: str
    example: Path
    damage: dict[str, Damage]
    read: Callable[[Path], Any]
    writes: tuple[str, ...] = ()
    weight: float = 1.0
    settle: Callable[[Path, random.Random], None] = field(default=lambda folder, draw: None)


class Refused(Exception):
    """The reader said in words that it does not read the input."""


class Hangs(BaseException):
    """The time is up; no Exception, for libraries catch these and go on."""


def outcome_of(subject: Subject, seed: int) -> str:
    """`refused`, `read`, or `wrong: ...`."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="widefield_malformed_") as place:
        folder = Path(shutil.copytree(subject.example, Path(place, "here")))
        for name in draw.sample(sorted(subject.damage), 1 if draw.random() < 0.8 else len(subject.damage)):
            path = folder / name
            path.write_bytes(subject.damage[name](path.read_bytes(), draw))
        subject.settle(folder, draw)
        before = snapshot(Path(place), subject.writes)
        became = _read(subject, folder)
        touched = sorted(name for name, now in _both(before, snapshot(Path(place), subject.writes)) if before.get(name) != now)
        return f"wrong: it changed {', '.join(touched[:3])} ({became})" if touched else became


def _read(subject: Subject, folder: Path) -> str:
    try:
        with _within(SECONDS), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            subject.read(folder)
    except Refused:
        return "refused"
    except Hangs:
        return f"wrong: no end within {SECONDS} s"
    except (ValueError, NotImplementedError) as error:
        if is_ours(error) and str(error).strip():
            return "refused"
        return f"wrong: an error of a library: {_last(error)}"
    except BaseException as error:  # a SystemExit too
        return f"wrong: {_last(error)}"
    return "read"


def _last(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/widefield/" in frame.filename]
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return " ".join(f"{type(error).__name__}: {str(error)[:300]}{where}".split())


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def snapshot(place: Path, writes: tuple[str, ...]) -> dict[str, str]:
    """Every file below a folder with its hash, but for those that may be written."""
    found = {}
    for root, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(root, name)
            if name not in writes:
                is_file = path.is_file()
                found[str(path.relative_to(place))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else "folder"
    return found


def _both(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, str | None]]:
    return [(name, after.get(name)) for name in {*before, *after}]
