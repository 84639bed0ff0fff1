"""The batch of images that a rank works on in one pass, and which of its images could be read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from widefield.geometry import Interval
from widefield.image_files.bytes_read import BytesRead

Window = tuple[Interval, ...]
"""The part of an image that a rank reads: an interval of pixels per dim."""


@dataclass(frozen=True)
class Batch:
    """What one rank works on in one pass.

    image: (B, C, H, W), or (B, C, D, H, W), with the dtype of the dataset.  target: (B, ...), as the dataset's `Labels` say.
    index: (B,) the numbers of the images in their split.
    samples: B, or 0 for a dummy batch, whose image does not count.
    whole_shape, window: where images are cut over ranks, the (C, *pixels) of the whole images and this rank's window of them;
        None where the batch has whole images.
    partner, share, box: how mixup and cutmix blend image i with image partner[i]; None without mixing.
    asked: the numbers of the images that the batch was to have.  readable: for each of these, whether this rank could read it.
    skipped: the names of unreadable images that were left out.  problem: why this rank cannot go on; all ranks then raise.
    refused: a rank of this copy has a problem, so none of its ranks uses the batch; the same on all of them.
    idle: the step has fewer samples than passes, so no rank runs this pass; the same on all ranks.
    shown: the pixel values that a thumbnail shows as black and as white.
    moments: (B, C, 2) float64, mean and standard deviation of each whole image, where data.intensity wants them.
    read: what reading it took from files.
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
    moments: Tensor | None = None
    read: BytesRead = BytesRead()

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, *pixels) of the whole images."""
        return tuple(self.whole_shape or self.image.shape[1:])

    def only(self, rows: Sequence[int]) -> Batch:
        """The batch with only these samples; one whose partner is left out is not mixed."""
        place = {row: number for number, row in enumerate(rows)}
        chosen = {name: getattr(self, name)[list(rows)] for name in ("image", "target", "index")}
        if self.partner is not None and self.share is not None and self.box is not None:
            partner = [place.get(int(self.partner[row]), number) for number, row in enumerate(rows)]
            chosen |= {"partner": torch.tensor(partner), "share": self.share[list(rows)], "box": self.box[list(rows)]}
        if self.moments is not None:
            chosen["moments"] = self.moments[list(rows)]
        return replace(self, **chosen, seeds=[self.seeds[row] for row in rows], samples=len(rows))

    def pin_memory(self) -> Batch:
        tensors = {name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def chained(order: str, passes: Sequence[Batch]) -> str:
    """A SHA-256 chain over the numbers of images, `order`, with those of a further step."""
    digest = hashlib.sha256(order.encode())
    for batch in passes:
        digest.update(batch.index[: batch.samples].numpy().tobytes())
    return digest.hexdigest()
