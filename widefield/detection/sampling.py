"""Which anchors, or boxes, of an image count in a loss: some of those that learn a box and some that learn none, drawn.

The draws of an image depend on its seed alone, so they are one device's on any ranks, and equal on ranks that share an image.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ImageDraws:
    """Draws of one image, in the order in which they are asked for.  seed: of the image in this pass."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def balanced(self, learns: Tensor, background: Tensor, *, most: int, share: float) -> tuple[Tensor, Tensor]:
        """The numbers, in rising order, of the drawn ones that learn a box, and of the others.

        learns, background: (n,) bool, whether one may be drawn as such.  most: how many are drawn, if there are so many.
        share: the most that learn a box.
        """
        positive, negative = (which.nonzero().flatten() for which in (learns, background))
        positive = self._some(positive, int(most * share))
        return positive, self._some(negative, most - len(positive))

    def _some(self, numbers: Tensor, most: int) -> Tensor:
        """At most so many of these numbers, drawn without replacement."""
        if len(numbers) <= most:
            return numbers
        return numbers[self._distinct(len(numbers), most).to(numbers.device)].sort().values

    def _distinct(self, count: int, most: int) -> Tensor:
        """(most,) different numbers below `count`.  Of many, drawn again where two are equal, without a permutation of 10^8."""
        if count < 8 * most or count < 2**16:
            return torch.randperm(count, generator=self._generator)[:most]
        found: dict[int, None] = {}
        while len(found) < most:
            found |= dict.fromkeys(torch.randint(count, (most - len(found),), generator=self._generator).tolist())
        return torch.tensor(list(found))
