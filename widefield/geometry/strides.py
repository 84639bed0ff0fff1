"""In which order the dims of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence


def stride_order(strides: Sequence[int]) -> tuple[int, ...]:
    """The dims from the outermost in memory to the innermost; of equal strides the first is the outer one."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def strides_like(shape: Sequence[int], strides: Sequence[int], *, keeps_zeros: bool = False) -> tuple[int, ...]:
    """The strides of memory without gaps for `shape`, whose dims lie in the order of `strides`.

    keeps_zeros: dims of stride 0, which repeat one value, do so.
    """
    made, step = [0] * len(shape), 1
    for dim in reversed(stride_order(strides)):
        if strides[dim] or not keeps_zeros:
            made[dim], step = step, step * max(1, shape[dim])
    return tuple(made)
