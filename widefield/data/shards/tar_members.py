"""What is in a tar: its files, where their bytes lie, and whether all of it is there.

Python's tarfile ends in silence at a header that it cannot read, and where a file is cut short between two members.  So the end
of the archive is looked at as well: by POSIX it is two blocks of zeros, and nothing else follows.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 512
"""Bytes; headers and contents begin at multiples of it (POSIX.1-2017, pax)."""
_COMPRESSED = {b"\x1f\x8b": ("gzip", "gunzip"), b"BZh": ("bzip2", "bunzip2"), b"\xfd7zXZ": ("xz", "unxz"),
               b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"), b"\x04\x22\x4d\x18": ("lz4", "unlz4")}  # fmt: skip
_META = re.compile(r"__[^/]*__($|/)")
"""Names of members that WebDataset leaves out."""


@dataclass(frozen=True)
class TarMember:
    """A file in a tar.  header: the byte where its headers begin.  start, size: of its content, in bytes."""

    name: str
    header: int
    start: int
    size: int


def key_and_extension(name: str) -> tuple[str, str] | None:
    """A member's key, and its extension in small letters; None: it belongs to no sample, as hidden files.

    >>> key_and_extension("a.b/007.Mask.PNG"), key_and_extension("./007.jpg")
    (('a.b/007', 'mask.png'), ('./007', 'jpg'))
    >>> key_and_extension("README"), key_and_extension("a/._007.jpg"), key_and_extension("__info__/a.json")
    (None, None, None)
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension or _META.match(name):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def members_of(path: Path) -> Iterator[TarMember]:
    """The files of a tar, in its order; folders are left out.  Reads headers alone.

    ValueError, with the tar and the member: it is compressed, cut short or damaged, goes on behind its end, or has a link, a
    sparse file or a device.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _refuse_compressed(path, file)
        tar = _named(path, size, lambda: tarfile.open(fileobj=file, mode="r:"))
        while (found := _named(path, size, tar.next)) is not None:
            tar.members = []  # tarfile keeps every member that it has read
            if not found.isdir():
                yield _checked(path, found, size)
        _check_end(path, file, tar.offset, size)


def _named(path: Path, size: int, action: Callable[[], Any]) -> Any:
    """What an action of tarfile's gives.  ValueError, with the tar: it fails, which damaged headers make it do in many ways."""
    try:
        return action()
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a tar ({str(error) or type(error).__name__}; {size} bytes): it is cut short or damaged; "
            "copy it again"
        ) from None


def member_at(file: BinaryIO, header: int) -> str:
    """The name of the member whose headers begin at a byte.  tarfile.TarError, OSError: there is none."""
    file.seek(header)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        found = tar.next()
    return "" if found is None else found.name


def _refuse_compressed(path: Path, file: BinaryIO) -> None:
    start = file.read(8)
    file.seek(0)
    for magic, (name, command) in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(
                f"{path} is compressed by {name}, so that a sample is reached only through all that lie before it; unpack it "
                f"once ({command} {path.name}): images are compressed already, so it will hardly grow"
            )


def _checked(path: Path, found: tarfile.TarInfo, size: int) -> TarMember:
    """ValueError: its bytes are not in the tar, one after the other."""
    if found.islnk() or found.issym():
        raise ValueError(
            f"{path}: the member {found.name} is a link to {found.linkname}, which has no bytes of its own; write the tar with "
            "tar --dereference --hard-dereference"
        )
    if found.issparse() or not found.isfile():
        kind = "a sparse file" if found.issparse() else "no file"
        raise ValueError(f"{path}: the member {found.name} is {kind}; write the tar of plain files, without tar --sparse")
    if found.offset_data + found.size > size:
        raise ValueError(
            f"{path} is cut short: the member {found.name} would end at byte {found.offset_data + found.size}, and the tar has "
            f"{size}; copy it again"
        )
    return TarMember(found.name, found.offset, found.offset_data, found.size)


def _check_end(path: Path, file: BinaryIO, at: int, size: int) -> None:
    """ValueError: after the last member, at byte `at`, are other things than zeros to the end of the file."""
    file.seek(at)
    block = file.read(BLOCK)
    if any(block):
        raise ValueError(f"{path} is damaged: the header at byte {at} of {size} is none; copy it again, or write it anew")
    if len(block) < BLOCK:
        raise ValueError(
            f"{path} is cut short: it ends at byte {size} without the block of zeros that ends a tar, so members may be "
            "missing; copy it again, or write it anew"
        )
    while piece := file.read(2**20):
        if piece.strip(b"\0"):
            raise ValueError(
                f"{path} goes on behind the end of the archive at byte {at} of {size}: it is two tars in one file, which tar "
                "--concatenate joins, or a block of it was lost; write it anew"
            )
