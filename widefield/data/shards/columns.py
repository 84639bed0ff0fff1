"""One member of each sample, of all shards together: the column of images, that of masks, that of files of labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from widefield.data.shards.index import ShardIndex
from widefield.data.shards.index_files import ShardFile
from widefield.data.shards.open_shards import StoredMember

Array = np.ndarray[Any, Any]
Indexed = tuple[ShardFile, ShardIndex]


@dataclass(frozen=True)
class MemberColumn:
    """A member of each sample.

    shard, extension: (samples,) int32 and int16, numbers in `shards` and `extensions`.
    header, start, size: (samples,) int64, see TarMember.
    """

    shards: tuple[ShardFile, ...]
    extensions: tuple[str, ...]
    shard: Array
    extension: Array
    header: Array
    start: Array
    size: Array

    def __len__(self) -> int:
        return len(self.start)

    def member(self, sample: int) -> StoredMember:
        place = (int(one[sample]) for one in (self.header, self.start, self.size))
        return StoredMember(self.shards[self.shard[sample]], *place, self.extensions[self.extension[sample]])

    def taken(self, samples: Array) -> MemberColumn:
        """Those of some samples, in their order."""
        parts = {name: getattr(self, name)[samples] for name in ("shard", "extension", "header", "start", "size")}
        return replace(self, **parts)


def extensions_in(shards: Sequence[Indexed]) -> tuple[str, ...]:
    """Of all members, in the order in which they are met."""
    return tuple(dict.fromkeys(extension for _, index in shards for extension in index.extensions))


def column_of(shards: Sequence[Indexed], wanted: Callable[[str], bool], *, noun: str, option: str) -> MemberColumn:
    """Each sample's member of a wanted extension.

    noun: what the member is, and option: what names its extension, for errors.
    ValueError, with the shard and a member of the sample: it has none, or several.
    """
    names = extensions_in(shards)
    parts: dict[str, list[Array]] = {name: [] for name in ("shard", "extension", "header", "start", "size")}
    for number, (shard, index) in enumerate(shards):
        members, twice = index.column(wanted)
        lost = np.flatnonzero(members < 0)
        if twice is not None or len(lost):
            sample = int(lost[0]) if twice is None else twice
            raise ValueError(_refusal(shard, index, sample, wanted, noun, option, count=len(lost) if twice is None else 0))
        of_all = np.array([names.index(extension) for extension in index.extensions], dtype=np.int16)
        parts["shard"].append(np.full(len(members), number, dtype=np.int32))
        parts["extension"].append(of_all[index.extension[members]])
        for name in ("header", "start", "size"):
            parts[name].append(getattr(index, name)[members])
    shard_of, extension, header, start, size = (np.concatenate(parts[name]) for name in parts)
    return MemberColumn(tuple(shard for shard, _ in shards), names, shard_of, extension, header, start, size)


def _refusal(
    shard: ShardFile, index: ShardIndex, sample: int, wanted: Callable[[str], bool], noun: str, option: str, *, count: int
) -> str:
    """count: of the samples of this shard that have none; 0: this one has several."""
    own = [
        index.extensions[index.extension[number]] for number in range(int(index.first[sample]), int(index.first[sample + 1]))
    ]
    place = f"{shard.path}: the sample {index.key(sample)} (its members are {', '.join(f'.{one}' for one in own)})"
    if count:
        more = f", and so have {count - 1} more samples of this shard" if count > 1 else ""
        return f"{place} has no {noun}{more}; add it, leave the sample out, or say which member it is: {option}={own[0]}"
    several = [one for one in own if wanted(one)]
    return f"{place} has {len(several)} members that may be its {noun}; say which it is: {option}={several[0]}"
