"""Strides: the order in which the dims of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence


def stride_order(strides: Sequence[int]) -> tuple[int, ...]:
    """The dims from the outermost in memory to the innermost; of dims with equal strides the first counts as outer."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def strides_like(shape: Sequence[int], strides: Sequence[int], *, keeps_zeros: bool = False) -> tuple[int, ...]:
    """Strides of a tensor of `shape` without gaps in memory, whose dims lie in the order of `strides`.

    keeps_zeros: expanded dims, which have stride 0, keep it.
    """
    made, step = [0] * len(shape), 1
    for dim in reversed(stride_order(strides)):
        if strides[dim] or not keeps_zeros:
            made[dim], step = step, step * max(1, shape[dim])
    return tuple(made)
