"""The loss of each micro-batch of a training pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.capture.fake_parameters import tensors_of
from widefield.capture.ir import Graph, Value
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

LossOf = Callable[[Any, Any], Tensor]
"""(output, target) to a loss that adds up over samples."""


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch of which the first `rows` samples count; later ones are padding.

    scaled: from a loss to the tensor on which `backward` is called.
    dims: the dim along which each output has samples, or None for none; needed where there is padding.
    """

    target: Any
    rows: int
    loss_of: LossOf
    scaled: Callable[[Tensor], Tensor]
    dims: list[int | None] | None = None

    def loss(self, output: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch's scaled loss, and its detached loss.  positions: the indices of its samples in the batch."""
        start, size = int(positions[0]), len(positions)
        count = min(size, self.rows - start)
        if count <= 0:
            nothing = sum((tensor.sum() * 0.0 for tensor in tensors_of(output)), torch.zeros((), device=positions.device))
            return nothing, nothing.detach()
        mine = output if count == size else self._first_of(output, count, size)
        target = tree_map(lambda leaf: _of_samples(leaf, start, start + count, self.rows), self.target)
        loss = self.loss_of(mine, target)
        return self.scaled(loss), loss.detach()

    def _first_of(self, output: Any, count: int, size: int) -> Any:
        """The output of the first `count` of a micro-batch's `size` samples."""
        assert self.dims is not None, "needed where there is padding"
        leaves, spec = tree_flatten(output)
        pairs = zip(leaves, self.dims, strict=True)
        own = [leaf if dim is None else leaf.narrow(dim, 0, count * (leaf.shape[dim] // size)) for leaf, dim in pairs]
        return tree_unflatten(own, spec)


def dims_of_samples(graph: Graph, larger: Graph) -> list[int | None]:
    """The dim along which each output has samples, or None: the first whose size differs in the graph of a larger batch."""
    pairs = zip(tree_leaves(graph.outputs), tree_leaves(larger.outputs), strict=True)
    return [_differing(one.shape, more.shape) if isinstance(one, Value) else None for one, more in pairs]


def _differing(shape: Sequence[int], larger: Sequence[int]) -> int | None:
    return next((dim for dim, (one, more) in enumerate(zip(shape, larger, strict=True)) if one != more), None)


def _of_samples(leaf: Any, first: int, last: int, count: int) -> Any:
    """The rows of a target that belong to samples `first` to `last` of `count`; a sample may have several rows."""
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    each = max(1, len(leaf) // count)
    return leaf[first * each : last * each]
