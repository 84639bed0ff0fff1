"""What does a rank work on in one pass?  A batch of images, and which of those it was to have could be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from widefield.geometry import Interval

Window = tuple[Interval, ...]
"""The part of an image that a rank holds: an interval of pixels per dim."""


@dataclass(frozen=True)
class Batch:
    """What one rank works on in one pass.  `image` is (B, C, H, W) uint8, or floating-point as a user's own dataset gave it;
    `target` is (B,) class numbers, or (B, H, W).

    Where a copy of the model lies on several ranks, each reads its window: `whole_shape` is (C, H, W) of the images that
    it was cut from, `window` where in them; both None where the batch holds whole images.
    `samples` counts the real ones: B, or 0 where the batch is a stand-in.  `index` (B,) numbers the images in their split.
    `partner`, `share` and `box` say how mixup and cutmix blend image i with image partner[i]; None without mixing.
    `skipped` names unreadable images left out; `problem` is why this rank cannot go on, for all ranks to raise together.
    `asked` numbers the images that the batch was to have (of a stand-in, the one to show), `readable` says which of them this
    rank could read.  `refused` on every rank of the copy alike where one of them has a problem: then nobody uses it.
    `idle` on every rank alike where a step has fewer samples than passes: then nobody runs this one.
    `shown`: pixel values that a picture of an image shows as black and as white.
    """

    image: Tensor
    target: Tensor
    index: Tensor
    seeds: list[int] = field(default_factory=list)
    samples: int = 0
    partner: Tensor | None = None
    share: Tensor | None = None
    box: Tensor | None = None
    skipped: list[str] = field(default_factory=list)
    problem: str | None = None
    asked: list[int] = field(default_factory=list)
    readable: list[bool] = field(default_factory=list)
    refused: bool = False
    idle: bool = False
    whole_shape: tuple[int, ...] | None = None
    window: Window | None = None
    shown: tuple[float, float] = (0.0, 255.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of the whole images."""
        return tuple(self.whole_shape or self.image.shape[1:])

    def only(self, rows: Sequence[int]) -> Batch:
        """The batch with these of its samples alone; one whose partner is left out stays pure."""
        place = {row: number for number, row in enumerate(rows)}
        chosen = {name: getattr(self, name)[list(rows)] for name in ("image", "target", "index")}
        if self.partner is not None and self.share is not None and self.box is not None:
            partner = [place.get(int(self.partner[row]), number) for number, row in enumerate(rows)]
            chosen |= {"partner": torch.tensor(partner), "share": self.share[list(rows)], "box": self.box[list(rows)]}
        return replace(self, **chosen, seeds=[self.seeds[row] for row in rows], samples=len(rows))

    def pin_memory(self) -> Batch:
        tensors = {name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)
