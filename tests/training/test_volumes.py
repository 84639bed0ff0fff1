"""Do volumes train under every plan to the numbers of one rank: losses of 20 steps, weights, and every voxel evaluated once?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from command import losses
from marks import few
from ranks import on_ranks
from same_numbers import check_same_numbers, evaluation
from torch import Tensor

from widefield.comm.mesh import AgreedError, World
from widefield.config import parse_config
from widefield.data.map_style import dataset_of
from widefield.run import train
from widefield.training.given import NOTHING, Given

CONFIG = """
model: {name: unet, options: {widths: [4, 6], shrink: [[1, 2, 2]]}}
data: {name: volume, batch_size: 2, workers: 0}
task: {name: segmentation, loss: dice_cross_entropy, metrics: [dice_cases, surface]}
optimizer: {name: sgd, lr: 0.5}
schedule: {name: constant, length: 20step}
evaluate: {every: 20step}
precision: float64
log: {tensorboard: false}
"""
SIZE = (9, 13, 11)
FLIPS = ["RandomHorizontalFlip", "RandomVerticalFlip", "RandomDepthFlip"]
BUILT_IN = ["data.options={size: [10, 22, 17], volumes: [6, 3], vessels: 1, blobs: 1}", f"data.augment={json.dumps(FLIPS)}"]
CROPS = [{"RandomCrop": {"size": list(SIZE), "pad_if_needed": True}}, {"ColorJitter": {"brightness": 0.2}}]
BALANCED = [{"ClassBalancedCrop": {"size": list(SIZE), "share": 0.5}}]
OWN = ["data.evaluate_batch_size=1", "data.read_evaluate=[]"]
KINDS = {
    "built in": ("uint8", BUILT_IN),
    "own int16": ("int16", [*OWN, f"data.read={json.dumps(CROPS)}", f"data.augment={json.dumps(FLIPS)}", "data.std=[0.01]"]),
    "own floats": ("float32", [*OWN, f"data.read={json.dumps(BALANCED)}", "data.augment=[GaussianNoise]"]),
}
PLANS = {
    "copies": (2, ["mesh.replicate=2"]),
    "planes": (2, ["mesh.replicate=1", "mesh.space=[2,1,1]"]),
    "rows": (2, ["mesh.replicate=1", "mesh.space=[1,2,1]"]),
    "stream": (1, ["mesh.replicate=1", "stream.tiles=[2,2,2]"]),
    "planes, streamed": (2, ["mesh.replicate=1", "mesh.space=[2,1,1]", "stream.tiles=[1,2,2]"]),
}


@dataclass(frozen=True)
class OwnVolumes:
    """Noise of odd sizes that differ from volume to volume; brighter voxels have higher class numbers."""

    count: int
    dtype: str
    classes = ("dark", "grey", "bright")
    spacing = (2.5, 1.0, 0.5)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        size = (7 + 2 * (index % 3), 11 + 2 * (index % 4), 9 + 2 * (index % 5))
        labels = torch.randint(0, 3, size, dtype=torch.uint8, generator=generator)
        bright = labels.double() / 3 + 0.3 * torch.rand(size, generator=generator, dtype=torch.float64)
        values = -900 + 1800 * bright if self.dtype == "int16" else bright
        return values[None].to(getattr(torch, self.dtype)), labels


def given(kind: str) -> Given:
    if kind == "built in":
        return NOTHING
    dtype, _ = KINDS[kind]
    return Given(data=partial(dataset_of, OwnVolumes(6, dtype), OwnVolumes(3, dtype)))


def go(mesh, folder: Path, kind: str, settings: list[str]) -> str:
    config = parse_config(CONFIG, [*KINDS[kind][1], *settings])
    return train(config, folder, mesh.world, given(kind)).reason


def trained(folder: Path, kind: str, ranks: int, settings: list[str]) -> Path:
    if ranks == 1:
        config = parse_config(CONFIG, [*KINDS[kind][1], *settings])
        assert train(config, folder, World(), given(kind)).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, kind, settings) == ["complete"] * ranks
    return folder


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory) -> tuple[str, Path]:
    kind = request.param
    return kind, trained(tmp_path_factory.mktemp("whole") / "run", kind, 1, ["mesh.replicate=1"])


@pytest.mark.long
@pytest.mark.parametrize("plan", few(PLANS, "planes", is_sweep=True))
def test_losses_of_20_steps_are_those_of_one_rank(whole, plan, tmp_path):
    kind, folder = whole
    ranks, settings = PLANS[plan]
    other = trained(tmp_path / "run", kind, ranks, settings)
    assert losses(folder)[0] > losses(folder)[-1]
    check_same_numbers(folder, other)


def test_every_voxel_is_evaluated_once_and_the_classes_are_told_apart(whole):
    kind, folder = whole
    told = evaluation(folder)
    voxels = 3 * 10 * 22 * 17 if kind == "built in" else sum(OwnVolumes(3, "float32")[i][1].numel() for i in range(3))
    assert sum(map(sum, told["confusion"])) == voxels and (told["images"], told["of"], told["duplicates"]) == (3, 3, 0)
    assert sum(sum(column) > 0 for column in zip(*told["confusion"], strict=True)) >= 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["stream.tiles=[2,2]"], "stream.tiles=[2, 2] has 2 numbers and images have 3 dims; give one number per dim"),
        (["model.options={dims: 2}"], "model.name=unet convolves over 2 dims and the data has volumes (C, D, H, W); take unet"),
        (["model.name=smp/Unet", "model.options={encoder_name: resnet18}"], "model.name=smp/Unet convolves over 2 dims"),
        (["data.cutmix=1"], "data.cutmix=1 mixes images of one class number per image"),
    ],
)
def test_what_is_for_images_is_refused_for_volumes(settings, told, tmp_path):
    config = parse_config(CONFIG, [*BUILT_IN, "mesh.replicate=1", *settings])
    with pytest.raises(AgreedError) as caught:
        train(config, tmp_path / "run", World())
    assert told in str(caught.value)


def refused(mesh, folder: Path) -> str:
    with pytest.raises(AgreedError) as caught:
        go(mesh, folder, "built in", ["mesh.replicate=1", "mesh.space=[2,1]"])
    return str(caught.value)


def test_a_mesh_for_images_is_refused_for_volumes_on_every_rank(tmp_path):
    told = on_ranks(2, refused, tmp_path / "run")
    assert told[0] == told[1] and "mesh.space=[2, 1] has 2 sizes and images have 3 dims" in told[0]
    assert "as [2, 1, 1]" in told[0]
