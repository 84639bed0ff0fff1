"""Which indices of one dim of a whole each rank of the channel axis holds.

The indices are a set, not an interval: of queries, keys and values in one tensor a rank holds its heads of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

MOST = 1 << 22
"""Elements of the dims that a view joins or splits, beyond which it is not looked at."""


class Shard:
    """Rank r holds `held[r]`, ascending, of dim `dim`; every index is held by one rank."""

    def __init__(self, dim: int, held: Sequence[np.ndarray]) -> None:
        self.dim, self.held = dim, tuple(np.asarray(indices, dtype=np.int64) for indices in held)

    @cached_property
    def _key(self) -> tuple:
        return self.dim, *(indices.tobytes() for indices in self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Part(dim {self.dim}, {[len(indices) for indices in self.held]})"

    @property
    def extent(self) -> int:
        """Of the whole's dim."""
        return sum(len(indices) for indices in self.held)

    def on(self, dim: int) -> Shard:
        """The same indices of another dim."""
        return Shard(dim, self.held)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Of what a rank holds of a whole."""
        return (*whole[: self.dim], len(self.held[rank]), *whole[self.dim + 1 :])

    @cached_property
    def order(self) -> np.ndarray:
        """For each index of the whole, where it is when all ranks' indices stand one after another."""
        return np.argsort(np.concatenate(self.held), kind="stable")

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the ranks' indices one after another are the whole's."""
        return bool((np.concatenate(self.held) == np.arange(self.extent)).all())


def split_along(shape: Sequence[int], axis: int, ways: int) -> list[np.ndarray]:
    """Indices of a dim that is seen as `shape`, dealt out in even runs of `axis`.

    >>> [indices.tolist() for indices in split_along((3, 4), 1, 2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    """
    indices = np.arange(math.prod(shape)).reshape(shape)
    return [np.sort(some.reshape(-1)) for some in np.array_split(indices, ways, axis=axis)]


def viewed(part: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """The part that it is once a tensor of shape `before` is viewed as `after`; None where that is no part of one dim.

    >>> viewed(Part(1, split_along((4,), 0, 2)), (2, 4, 3), (2, 2, 2, 3))
    Part(dim 1, [1, 1])
    """
    block = _block_with(part.dim, before, after)
    if block is None:
        return None
    (first, last), (start, stop) = block
    inner, outer = tuple(before[first:last]), tuple(after[start:stop])
    if math.prod(inner) > MOST:
        return None
    numbers = np.arange(math.prod(inner)).reshape(inner)
    held: list[np.ndarray] = []
    dims: set[int] = set()
    for indices in part.held:
        flat = np.sort(np.take(numbers, indices, axis=part.dim - first).reshape(-1))
        found = _one_dim_of(flat, outer)
        if found is None:
            return None
        dims.add(found[0])
        held.append(found[1])
    return Shard(start + dims.pop(), held) if len(dims) == 1 else None


def _one_dim_of(flat: np.ndarray, shape: tuple[int, ...]) -> tuple[int, np.ndarray] | None:
    """The dim of `shape` and its indices that give these elements, all indices of the other dims taken."""
    places = [np.unique(place) for place in np.unravel_index(flat, shape)]
    short = [dim for dim, (place, extent) in enumerate(zip(places, shape, strict=True)) if len(place) != extent]
    if len(short) > 1 or math.prod(len(place) for place in places) != len(flat):
        return None
    return (short[0], places[short[0]]) if short else None


def _block_with(dim: int, before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The fewest neighbouring dims around `dim` that a view turns into neighbouring dims with as many elements."""
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
    """What each rank has of indices start, start + step, ... of the part's dim; None where some rank has none."""
    held = []
    for indices in part.held:
        kept = indices[(indices >= start) & (indices < stop)]
        held.append((kept[(kept - start) % step == 0] - start) // step)
    return Shard(part.dim, held) if all(len(indices) for indices in held) else None


def joined(parts: Sequence[Shard]) -> Shard:
    """The part of tensors joined along the dim that they are cut in."""
    starts = np.cumsum([0, *(part.extent for part in parts)])
    ranks = range(len(parts[0].held))
    held = [np.concatenate([part.held[rank] + start for part, start in zip(parts, starts, strict=False)]) for rank in ranks]
    return Shard(parts[0].dim, held)


def in_groups(part: Shard, groups: int) -> Shard | None:
    """Which of a dim's even, neighbouring groups each rank holds; None where a rank holds a part of one."""
    found = viewed(part.on(0), (part.extent,), (groups, part.extent // groups))
    return found if found is not None and found.dim == 0 else None
