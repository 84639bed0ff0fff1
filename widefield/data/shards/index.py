"""The index of a shard: which members make a sample, and where their bytes lie.

It is made once from the headers, and needs no memory of the sort of a list of names: some 30 bytes per member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.data.shards.dividing import mark_of
from widefield.data.shards.tar_members import key_and_extension, members_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ShardIndex:
    """What is in a shard.

    first: (samples + 1,) int64, at which member each sample begins.
    extension: (members,) int16, which of `extensions` each has.  header, start, size: (members,) int64, see TarMember.
    keys: (bytes,) uint8, those of all samples, one after the other in UTF-8.  key_ends: (samples,) int64, where each ends.
    marks: (samples,) int64, by which they are divided; see dividing.py.
    others: how many files are no member of a sample.
    """

    first: Array
    extension: Array
    header: Array
    start: Array
    size: Array
    keys: Array
    key_ends: Array
    marks: Array
    extensions: tuple[str, ...]
    others: int

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, sample: int) -> str:
        begin = int(self.key_ends[sample - 1]) if sample else 0
        return bytes(self.keys[begin : int(self.key_ends[sample])]).decode("utf-8", "surrogateescape")

    def member(self, sample: int, extension: str) -> int | None:
        """The number of a sample's member of an extension; None: it has none."""
        run = range(int(self.first[sample]), int(self.first[sample + 1]))
        return next((number for number in run if self.extensions[self.extension[number]] == extension), None)

    def column(self, wanted: Callable[[str], bool]) -> tuple[Array, int | None]:
        """(samples,) int64: each sample's member whose extension is wanted, -1 where it has none; and a sample that has two."""
        is_wanted = np.array([wanted(extension) for extension in self.extensions], dtype=bool)[self.extension]
        members = np.flatnonzero(is_wanted)
        samples = np.searchsorted(self.first, members, side="right") - 1
        found = np.full(len(self), -1, dtype=np.int64)
        found[samples] = members
        twice = samples[1:][samples[1:] == samples[:-1]]
        return found, int(twice[0]) if len(twice) else None


def make_index(path: Path) -> ShardIndex:
    """Read the headers of a shard.

    ValueError, with the shard and the member: as `members_of`; two samples have one key, two members of a sample one extension;
    it has no samples.
    """
    first, extension, places, ends, marks = [0], [], [], [0], []
    keys, numbers, seen, others = bytearray(), dict[str, int](), dict[str, str](), 0
    current, own = None, dict[str, str]()
    for member in members_of(path):
        found = key_and_extension(member.name)
        if found is None:
            others += 1
            continue
        if found[0] != current:
            _refuse_again(path, found[0], seen, member.name)
            current, own = found[0], {}
            seen[current] = member.name
            keys += current.encode("utf-8", "surrogateescape")
            ends.append(len(keys))
            marks.append(mark_of(f"{path.name}/{current}"))
            first.append(len(places))
        if found[1] in own:
            raise ValueError(f"{path}: the members {own[found[1]]} and {member.name} are one part of one sample; remove one")
        own[found[1]] = member.name
        places.append((member.header, member.start, member.size))
        extension.append(numbers.setdefault(found[1], len(numbers)))
    if not places:
        raise ValueError(
            f"{path} holds no samples: none of its {others} files is named as KEY.EXTENSION, as 000123.jpg and 000123.cls"
        )
    header, start, size = np.array(places, dtype=np.int64).T.copy()
    return ShardIndex(
        np.array([*first[1:], len(places)], dtype=np.int64), np.array(extension, dtype=np.int16), header, start, size,
        np.frombuffer(bytes(keys), dtype=np.uint8), np.array(ends[1:], dtype=np.int64), np.array(marks, dtype=np.int64),
        tuple(numbers), others,
    )  # fmt: skip


def _refuse_again(path: Path, key: str, seen: dict[str, str], name: str) -> None:
    if key in seen:
        raise ValueError(
            f"{path}: two samples have the key {key}: {seen[key]} begins one, and {name}, behind other samples, a second; "
            "members of a sample follow each other: write the tar with tar --sort=name, or give the samples keys of their own"
        )
