"""Which indices of a dim of a tensor each rank of the channel axis has.

They are a set, not an interval: where one tensor has queries, keys and values, a rank has its heads of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

MOST = 1 << 22
"""Largest number of elements in the dims that a view joins or splits for which its shards are computed."""


class Shard:
    """Rank r has the ascending `indices[r]` of dim `dim`; every index is on one rank."""

    def __init__(self, dim: int, indices: Sequence[np.ndarray]) -> None:
        self.dim, self.indices = dim, tuple(np.asarray(some, dtype=np.int64) for some in indices)

    @cached_property
    def _key(self) -> tuple:
        return self.dim, *(indices.tobytes() for indices in self.indices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Shard(dim {self.dim}, {[len(indices) for indices in self.indices]})"

    @property
    def extent(self) -> int:
        """The length of the full dim."""
        return sum(len(indices) for indices in self.indices)

    def on(self, dim: int) -> Shard:
        """The same indices of another dim."""
        return Shard(dim, self.indices)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of shape `whole`."""
        return (*whole[: self.dim], len(self.indices[rank]), *whole[self.dim + 1 :])

    @cached_property
    def order(self) -> np.ndarray:
        """The position of each index of the full dim in the concatenation of all ranks' indices."""
        return np.argsort(np.concatenate(self.indices), kind="stable")

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the concatenation of all ranks' indices is 0, 1, 2, ..."""
        return bool((np.concatenate(self.indices) == np.arange(self.extent)).all())


def split_along(shape: Sequence[int], axis: int, num_shards: int) -> list[np.ndarray]:
    """The indices of each shard of a flattened dim of `shape` that is divided evenly along `axis`.

    >>> [indices.tolist() for indices in split_along((3, 4), 1, 2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    """
    indices = np.arange(math.prod(shape)).reshape(shape)
    return [np.sort(some.reshape(-1)) for some in np.array_split(indices, num_shards, axis=axis)]


def viewed(part: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """The shard after a tensor of shape `before` is viewed as `after`; None where no single dim is sharded.

    >>> viewed(Shard(1, split_along((4,), 0, 2)), (2, 4, 3), (2, 2, 2, 3))
    Shard(dim 1, [1, 1])
    """
    block = _block_with(part.dim, before, after)
    if block is None:
        return None
    (first, last), (start, stop) = block
    inner, outer = tuple(before[first:last]), tuple(after[start:stop])
    if math.prod(inner) > MOST:
        return None
    numbers = np.arange(math.prod(inner)).reshape(inner)
    found_indices: list[np.ndarray] = []
    dims: set[int] = set()
    for indices in part.indices:
        flat = np.sort(np.take(numbers, indices, axis=part.dim - first).reshape(-1))
        found = _one_dim_of(flat, outer)
        if found is None:
            return None
        dims.add(found[0])
        found_indices.append(found[1])
    return Shard(start + dims.pop(), found_indices) if len(dims) == 1 else None


def _one_dim_of(flat: np.ndarray, shape: tuple[int, ...]) -> tuple[int, np.ndarray] | None:
    """The dim of `shape`, and its indices, that select these elements, with all indices of the other dims."""
    places = [np.unique(place) for place in np.unravel_index(flat, shape)]
    short = [dim for dim, (place, extent) in enumerate(zip(places, shape, strict=True)) if len(place) != extent]
    if len(short) > 1 or math.prod(len(place) for place in places) != len(flat):
        return None
    return (short[0], places[short[0]]) if short else None


def _block_with(dim: int, before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The smallest run of dims around `dim` that a view turns into a run of dims with as many elements."""
    i = j = 0
    while i < len(before) and j < len(after):
        first, start, sizes = i, j, [before[i], after[j]]
        i, j = i + 1, j + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] and i < len(before):
                sizes[0], i = sizes[0] * before[i], i + 1
            elif sizes[0] > sizes[1] and j < len(after):
                sizes[1], j = sizes[1] * after[j], j + 1
            else:
                return None
        if first <= dim < i:
            return (first, i), (start, j)
    return None


def sliced(part: Shard, start: int, stop: int, step: int = 1) -> Shard | None:
    """The shard of the slice start:stop:step along the sharded dim; None where a rank has no index of it."""
    found = []
    for indices in part.indices:
        within = indices[(indices >= start) & (indices < stop)]
        found.append((within[(within - start) % step == 0] - start) // step)
    return Shard(part.dim, found) if all(len(indices) for indices in found) else None


def joined(parts: Sequence[Shard]) -> Shard:
    """The shard of a concatenation along the dim in which all tensors are sharded."""
    starts = np.cumsum([0, *(part.extent for part in parts)])
    ranks = range(len(parts[0].indices))
    found = [np.concatenate([part.indices[rank] + start for part, start in zip(parts, starts, strict=False)]) for rank in ranks]
    return Shard(parts[0].dim, found)


def in_groups(part: Shard, groups: int) -> Shard | None:
    """Which of the even groups of a dim each rank has, as a Shard of dim 0; None where a rank has only a part of one."""
    found = viewed(part.on(0), (part.extent,), (groups, part.extent // groups))
    return found if found is not None and found.dim == 0 else None
