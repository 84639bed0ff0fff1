"""The two sides of samples by hashes of their names, exactly as splits.py divides them, but in arrays: of millions of samples.

A sample's name is that of its shard and its key, its mark the first 8 bytes of the name's SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from widefield.config import DataConfig

Array = np.ndarray[Any, Any]


def mark_of(name: str) -> int:
    """The first 8 bytes of the hash by which splits.py sorts names, as an int64 with the same bits."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big", signed=True)


def divided(marks: Array, strata: Array | None, names: Sequence[str], config: DataConfig) -> tuple[Array, Array] | None:
    """The samples to train on, and to evaluate, in order.

    marks: (samples,) int64.  strata: (samples,), the class of each; None: of no single one.  names: of the classes.
    None: `split_items` is to say what is wrong, as too few samples of a class.
    """
    places = np.argsort(np.argsort(np.array(names), kind="stable")) if strata is not None else np.zeros(1, dtype=np.int64)
    of = places[strata] if strata is not None else np.zeros(len(marks), dtype=np.int64)
    counts = np.bincount(of)
    few = counts[counts > 0].min(initial=len(marks)) < 2 or len(marks) < 2
    if few or (not config.hold_out) == (config.fold is None):
        return None
    order = np.lexsort((marks.view(np.uint64), of))
    starts = np.cumsum(counts) - counts
    sorted_of = of[order]
    rank, count = np.arange(len(order)) - starts[sorted_of], counts[sorted_of]
    if config.fold is None:
        held = rank < np.minimum(count - 1, np.maximum(1, np.round(config.hold_out * count)))  # type: ignore[operator]
    elif config.fold >= config.folds or len(marks) < config.folds:
        return None
    else:
        held = _fold_of(rank, count, config.folds) == config.fold
    is_held = np.empty(len(order), dtype=bool)
    is_held[order] = held
    if is_held.all() or not is_held.any():
        return None
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _fold_of(rank: Array, count: Array, folds: int) -> Array:
    """Of samples in the order of their strata: runs of each, and those of strata smaller than `folds` dealt out one by one."""
    small = count < folds
    found = rank * folds // count
    found[small] = np.arange(int(small.sum())) % folds
    return found
