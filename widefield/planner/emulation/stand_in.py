"""Images that nobody has: a dataset of a given size whose pixels are never read, for a plan without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from widefield.data import Dataset, Labels
from widefield.data.batch import Batch
from widefield.training.given import Given

TaskName = Literal["classification", "segmentation", "restoration"]


_LABELS: dict[TaskName, Labels] = {"classification": "class", "segmentation": "pixels", "restoration": "image"}


@dataclass(frozen=True)
class StandIn:
    """A split of `samples` images of one shape, all zeros, which take no memory.  shape: (C, *pixels).

    target: where targets are images, (K, *scale times the pixels).
    """

    shape: tuple[int, ...]
    samples: int
    has_labels_of_pixels: bool
    dtype: torch.dtype = torch.uint8
    target: tuple[int, ...] = ()
    scale: int = 1

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        shape = self.target or self.shape[1:]
        target = torch.zeros((), dtype=torch.uint8).expand(shape) if self.has_labels_of_pixels else 0
        return torch.zeros((), dtype=self.dtype).expand(self.shape), target

    def name_of(self, index: int) -> str:
        return f"image {index} of the plan"

    def target_of(self, index: int) -> int:
        return 0

    def batch(self) -> Batch:
        """A batch of one image, as a dummy batch has."""
        image, target = self.read(0)
        return Batch(image[None], torch.as_tensor(target)[None], torch.zeros(1, dtype=torch.int64))


def stand_in_data(
    image: Sequence[int], *, classes: int, samples: int = 1 << 20, task: TaskName = "classification", scale: int = 1
) -> Given:
    """Data for `emulated_step` that has sizes and no pixels.

    image: (C, H, W) or (C, D, H, W).  samples: in the training split.  scale: of the targets of restoration.
    ValueError: not such a shape, or no class.
    """
    shape = tuple(image)
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(
            f"the image {'x'.join(map(str, shape))} is none; give channels and pixels, as 3x1024x1024 or 1x64x64x64"
        )
    if classes < 1 or samples < 1:
        raise ValueError(f"{classes} classes and {samples} images are too few; give 1 or more of each")
    target = (classes, *(scale * extent for extent in shape[1:])) if task == "restoration" else ()
    split = StandIn(shape, samples, task != "classification", target=target, scale=scale)
    channels = shape[0]
    dataset = Dataset(
        train=split,
        evaluate=split,
        classes=[str(number) for number in range(classes)],
        channels=channels,
        mean=[0.5] * channels,
        std=[0.25] * channels,
        in_memory=True,
        labels=_LABELS[task],
        dims=len(shape) - 1,
        scale=scale,
    )
    return Given(data=lambda: dataset)
