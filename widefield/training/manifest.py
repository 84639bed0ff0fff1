"""Detects damaged files: `manifest.sha256` has a SHA-256 per file of a folder, in the format of `sha256sum -c`.

The manifest is read strictly: it must equal, byte for byte, what is written for the hashes read from it.  So a flipped bit in
the manifest itself is detected too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from widefield.trust import leads_out

MANIFEST = "manifest.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][A-Za-z0-9_.-]*)")  # a name of this folder: no `/`, no `..`
_THREADS = 4  # hashing releases the GIL, and 4 threads are as fast as a disk reads


def sha256_of(path: Path) -> str:
    """64 lowercase hexadecimal digits; OSError where the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of the files in `folder`, by name."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: sha256_of(folder / name), names), strict=True))


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_bytes(hashes: Mapping[str, str]) -> bytes:
    """The manifest: one line per file, `<hash>  <name>`, sorted by name."""
    return "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode("ascii")


def from_bytes(raw: bytes) -> dict[str, str]:
    """The hashes in a manifest, by name.  ValueError: it is not, byte for byte, what `to_bytes` writes."""
    hashes: dict[str, str] = {}
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        match = _LINE.fullmatch(line.decode("ascii", "replace"))
        if match is None:
            raise ValueError(f"line {number} is no SHA-256, two blanks and a name")
        hashes[match[2]] = match[1]
    if to_bytes(hashes) != raw:
        raise ValueError("its lines are not the sorted, complete ones that were written")
    return hashes


def write_manifest(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write the manifest of `folder`, and sync it and the folder."""
    path = folder / MANIFEST
    path.write_bytes(to_bytes(hashes))
    sync(path)
    sync(folder)


def names_in(folder: Path) -> set[str]:
    """The files that the manifest of a folder lists.  ValueError or OSError: it cannot be read."""
    return set(from_bytes((folder / MANIFEST).read_bytes()))


def what_is_wrong(folder: Path, *, needed: Iterable[str] = ()) -> str | None:
    """None where every file that the manifest of `folder` lists has its hash; else the first bad file and what is wrong.

    needed: files that the manifest must list.  Files that it does not list are ignored.
    """
    try:
        hashes = from_bytes((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be relied on: {error}"
    for name in needed:
        if name not in hashes:
            return f"{name} is not listed in {MANIFEST}"
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = pool.map(lambda name: _what_is_wrong_with(folder / name, hashes[name]), hashes)
        return next((problem for problem in problems if problem is not None), None)


def _what_is_wrong_with(path: Path, wanted: str) -> str | None:
    if leads_out(path.parent, path):
        return f"{path.name} is a link out of its folder"
    try:
        found = sha256_of(path)
        if found == wanted:
            return None
        size = f"{path.stat().st_size:,} bytes"
        return f"{path.name} ({size}) has the SHA-256 {found[:12]}... and {MANIFEST} says {wanted[:12]}..."
    except FileNotFoundError:
        return f"{path.name}, which {MANIFEST} lists, is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
