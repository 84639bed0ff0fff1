"""What a pass through the stages is to learn: of each micro-batch, its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from widefield.engine.stream.stand_ins import tensors_of

LossOf = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Job:
    """What a pass is to learn: `rows` samples count.  scaled: makes of the loss what is differentiated."""

    target: Any
    rows: int
    loss_of: LossOf
    scaled: Callable[[Tensor], Tensor]

    def loss(self, output: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of one micro-batch: what is differentiated, and the detached loss.  positions: of its samples in the batch."""
        start, size = int(positions[0]), len(positions)
        count = min(size, self.rows - start)
        if count <= 0:
            nothing = sum((tensor.sum() * 0.0 for tensor in tensors_of(output)), torch.zeros((), device=positions.device))
            return nothing, nothing.detach()
        mine = output if count == size else tree_map(lambda leaf: _of_samples(leaf, 0, count, size), output)
        target = tree_map(lambda leaf: _of_samples(leaf, start, start + count, self.rows), self.target)
        loss = self.loss_of(mine, target)
        return self.scaled(loss), loss.detach()


def _of_samples(leaf: Any, first: int, last: int, count: int) -> Any:
    """The rows of some samples out of `count`, each of which may have several."""
    if not isinstance(leaf, Tensor):
        return leaf
    each = max(1, len(leaf) // count)
    return leaf[first * each : last * each]
