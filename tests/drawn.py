"""Drawn images with targets of every kind, and a net for them: `images_of("layers")`, `net_for("layers")`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from widefield.data import Dataset

CLASSES, IGNORED, IMAGES = 3, 255, 5
TASKS = {
    "class": "classification", "classes": "multilabel", "values": "regression", "pixels": "segmentation",
    "layers": "multilabel_segmentation", "image": "restoration",
}  # fmt: skip
"""The task of each kind of targets."""


@dataclass(frozen=True)
class Drawn:
    """Five images of 9 x 10 pixels with targets of any kind; class 0 is in one image alone, so that Dice of images differs."""

    labels: str

    def __len__(self) -> int:
        return IMAGES

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (1, 9, 10), dtype=torch.uint8, generator=generator)
        return image, self._target(index, generator)

    def _target(self, index: int, generator: torch.Generator) -> int | Tensor:
        if self.labels == "class":
            return index % CLASSES
        if self.labels == "values":
            return torch.randn(CLASSES, generator=generator)
        if self.labels == "image":
            return torch.randint(0, 256, (CLASSES, 9, 10), dtype=torch.uint8, generator=generator)
        shape = {"classes": (CLASSES,), "layers": (CLASSES, 9, 10), "pixels": (9, 10)}[self.labels]
        if self.labels != "pixels":
            return torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)
        target = torch.randint(min(index, 1), CLASSES, shape, dtype=torch.uint8, generator=generator)
        target[torch.rand(shape, generator=generator) < index / 8] = IGNORED
        return target

    def name_of(self, index: int) -> str:
        return f"drawn/{index}"


class Net(nn.Module):
    """A window of 5 pixels; the mean over pixels where an image has one answer."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 3, padding=1))
        self.whole = whole

    def forward(self, image: Tensor) -> Tensor:
        output = self.layers(image)
        return output.mean((2, 3)) if self.whole else output


def images_of(labels: str) -> Dataset:
    return Dataset(Drawn(labels), Drawn(labels), ["a", "b", "c"], 1, [0.5], [0.25], in_memory=True, labels=labels)


def net_for(labels: str) -> Net:
    """The same weights in each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(whole=labels not in ("pixels", "layers", "image"))
