"""Synchronous data-parallel training: after every batch all workers take one step with the mean of their gradients.

The numbers are one process's with the batches of all.  The other algorithms are compared with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from widefield.agreement.descent import Descent
from widefield.agreement.mixing import mixed


def weighted_mean(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The mean of tensors, each of which counts as often as it has samples.  ValueError: none has any."""
    total = sum(counts)
    if total < 1:
        raise ValueError(f"a mean of {len(tensors)} tensors with {total} samples in all; at least one has to have a sample")
    return mixed(tensors, [count / total for count in counts])


def all_reduce_bytes(workers: int, size: int) -> int:
    """The bytes that all workers together send in a ring all-reduce of `size` bytes: 2 (n - 1) / n * size each."""
    return 2 * (workers - 1) * size


@dataclass(frozen=True)
class AllReduce:
    """The mean of the gradients, with a ring all-reduce, each step."""

    descent: Descent = field(default_factory=Descent)
