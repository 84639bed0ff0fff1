"""The training runs whose steps are both measured and emulated: models by name, plans by name, and which meet.

Each model meets each plan that it can run on, with both optimizers in turn.  Images are such that a step takes a second or so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from widefield.config import RunConfig, parse_config
from widefield.data.map_style import dataset_of
from widefield.training.given import Given

CLASSES = 3
SAMPLES = 24


@dataclass(frozen=True)
class Net:
    """A model of a recipe.  image: (C, *pixels).  task: `classification` or `segmentation`."""

    name: str
    image: tuple[int, ...]
    task: str = "classification"
    options: dict = field(default_factory=dict)
    batch: int = 4


PAGE, VOLUME = (3, 96, 96), (1, 32, 32, 32)
SEGMENTATION = "segmentation"
_MONAI_3D = {"spatial_dims": 3, "in_channels": 1}

NETS = {
    "unet": Net("unet", PAGE, SEGMENTATION, {"widths": [16, 32, 64]}),
    "unet group": Net("unet", PAGE, SEGMENTATION, {"widths": [16, 32, 64], "norm": "group"}),
    "unet 3-D": Net("unet", VOLUME, SEGMENTATION, {"widths": [8, 16, 32]}, batch=2),
    "resnet": Net("resnet", PAGE, options={"widths": [16, 32, 64], "blocks": 2}),
    "resnet50": Net("torchvision/resnet50", PAGE),
    "vgg11_bn": Net("torchvision/vgg11_bn", (3, 64, 64)),
    "deeplabv3": Net("torchvision/deeplabv3_resnet50", PAGE, SEGMENTATION),
    "convnext": Net("timm/convnext_atto", PAGE),
    "efficientnet": Net("timm/efficientnet_b0", PAGE),
    "vit": Net("timm/vit_tiny_patch16_224", PAGE, options={"img_size": 96}),
    "densenet": Net("timm/densenet121", PAGE),
    "mobilenet": Net("timm/mobilenetv3_small_100", PAGE),
    "smp unet": Net("smp/Unet", PAGE, SEGMENTATION, {"encoder_name": "resnet18", "encoder_weights": None}),
    "monai unet 3-D": Net(
        "monai/UNet",
        VOLUME,
        SEGMENTATION,
        _MONAI_3D | {"channels": [8, 16, 32], "strides": [2, 2], "num_res_units": 1},
        batch=2,
    ),
    "dynunet 3-D": Net(
        "monai/DynUNet",
        VOLUME,
        SEGMENTATION,
        _MONAI_3D | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]},
        batch=2,
    ),
}

PLANS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "copies": (2, []),
    "zero3": (2, ["mesh.replicate=1", "mesh.shard=2"]),
    "rows": (2, ["mesh.replicate=1", "mesh.space=[2,1]"]),
    "tiles": (4, ["mesh.replicate=1", "mesh.space=[2,2]"]),
    "channel": (2, ["mesh.replicate=1", "mesh.channel=2"]),
    "stages": (2, ["mesh.replicate=1", "mesh.stage=2"]),
    "recompute": (1, ["recompute={}"]),
    "stream": (1, ["stream.tiles=[2,2]"]),
    "copies of rows": (4, ["mesh.replicate=2", "mesh.space=[2,1]"]),
    "zero3 of rows": (4, ["mesh.replicate=1", "mesh.shard=2", "mesh.space=[2,1]"]),
    "copies, recompute": (2, ["recompute={}"]),
    "columns": (2, ["mesh.replicate=1", "mesh.space=[1,2]"]),
    "zero3, recompute": (2, ["mesh.replicate=1", "mesh.shard=2", "recompute={}"]),
    "rows, recompute": (2, ["mesh.replicate=1", "mesh.space=[2,1]", "recompute={}"]),
    "zero2": (2, ["mesh.replicate=1", "mesh.shard=2", "sharding.zero=2"]),
    "space of one dim": (2, ["mesh.replicate=1", "mesh.space=[2]"]),
}
"""By name: the ranks, and what a plan sets in a recipe.  Space and stream have sizes for images; of volumes one more."""

SUITE = tuple(PLANS)[:12]
"""The plans that every model meets; the others are more to choose from."""

OPTIMIZERS = {"sgd": ["optimizer.name=sgd", "optimizer.lr=1e-3"], "adamw": ["optimizer.name=adamw", "optimizer.lr=1e-3"]}


class Case(Protocol):
    """A training run of some ranks: its recipe and its data."""

    @property
    def ranks(self) -> int: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def given(self) -> Given: ...


@dataclass(frozen=True)
class TruthCase:
    """A model under a plan with an optimizer, by their names."""

    net: str
    plan: str
    optimizer: str
    on_cpu: bool = True

    def __str__(self) -> str:
        return f"{self.net}, {self.plan}, {self.optimizer}"

    @property
    def ranks(self) -> int:
        return PLANS[self.plan][0]

    @property
    def config(self) -> RunConfig:
        net = NETS[self.net]
        return parse_config(recipe_of(net), [*_plan_of(net, self.plan), *OPTIMIZERS[self.optimizer]])

    @property
    def given(self) -> Given:
        return data_of(NETS[self.net])


def all_cases() -> list[TruthCase]:
    """Every model under every plan once, the optimizers in turn."""
    return [
        TruthCase(net, plan, ("sgd", "adamw")[(row + column) % 2])
        for row, net in enumerate(NETS)
        for column, plan in enumerate(SUITE)
    ]


def _plan_of(net: Net, plan: str) -> list[str]:
    settings = PLANS[plan][1]
    if len(net.image) == 4:
        settings = [re.sub(r"\[(\d),(\d)\]", r"[\1,\2,1]", text) for text in settings]
    return settings


def recipe_of(net: Net) -> str:
    options = ", ".join(f"{name}: {_yaml(value)}" for name, value in net.options.items())
    return f"""
model: {{name: {net.name}, options: {{{options}}}}}
data: {{name: digits, batch_size: {net.batch}, workers: 0}}
task: {{name: {net.task}}}
schedule: {{name: constant, length: 1ep}}
"""


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


# ---------------------------------------------------------------------------------------------- data


class RandomSamples:
    """Images of random pixels from 0 to 1 with labels, made when they are asked for, so that none is held."""

    classes = [f"class {number}" for number in range(CLASSES)]

    def __init__(self, net: Net) -> None:
        self.image, self.task, self.samples = net.image, net.task, max(SAMPLES, net.batch)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        random = np.random.default_rng(index)
        image = torch.from_numpy(random.random(self.image, dtype=np.float32))
        if self.task == "classification":
            return image, index % CLASSES
        return image, torch.from_numpy(random.integers(0, CLASSES, self.image[1:]))


def data_of(net: Net) -> Given:
    samples = RandomSamples(net)
    return Given(data=lambda: dataset_of(samples, samples, classes=RandomSamples.classes))
