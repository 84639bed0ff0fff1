"""Are patches and tissue that do not fit the data refused, and do volumes train on patches as on one rank?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from marks import few
from ranks import on_ranks
from same_numbers import check_same_numbers
from torch import Tensor

from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import parse_config
from widefield.data import BadImageError, Dataset
from widefield.geometry import Interval
from widefield.geometry.box import full_box, slices
from widefield.plans import Plan
from widefield.run import train
from widefield.training.patches import sampled

ALONE = Mesh(Plan(), World(), torch.device("cpu"))
TEXT = """
model: {name: resnet}
data: {name: digits}
task: {name: multilabel_segmentation}
"""
GLASS = 240


@dataclass(frozen=True)
class Windows:
    """Images of one grey, of which every label is 0.  labels: their kind.  bad: those whose windows cannot be read."""

    size: tuple[int, ...] = (20, 16)
    labels: str = "layers"
    bad: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 3

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (3, *self.size)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return self.read_window(index, full_box(self.size))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        if index in self.bad:
            raise BadImageError(f"cannot read image {index}")
        image = torch.full((3, *self.size), GLASS, dtype=torch.uint8)[..., *slices(window)]
        marks = torch.zeros(2, *self.size, dtype=torch.uint8)[..., *slices(window)]
        return image, {"layers": marks, "pixels": marks[0]}.get(self.labels, 0)


@dataclass(frozen=True)
class Wholes:
    def __len__(self) -> int:
        return 3

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 20, 16, dtype=torch.uint8), 0


def dataset(images=None, **about) -> Dataset:
    images = Windows() if images is None else images
    about = {"labels": getattr(images, "labels", "class"), "dims": len(getattr(images, "size", (1, 1))), **about}
    return Dataset(images, images, ["a", "b"], 3, [0.0] * 3, [1.0] * 3, in_memory=True, **about)


def asked(*settings: str):
    return parse_config(TEXT, list(settings))


REFUSED = [
    (Windows(), ["data.patches={size: [8, 8], draw: cover}"], "patches of 8 x 8 px reach beyond images, and task.name=multi"),
    (Windows(), ["data.patches={size: [24, 8]}"], "patches of 24 x 8 px reach beyond images"),
    (Windows(), ["data.patches={size: [8, 8]}"], "set data.patches.evaluate=whole"),
    (
        Wholes(),
        ["data.patches={size: [8, 8]}"],
        "data.patches reads windows of images and data.name=digits reads each as a whole",
    ),
    (Wholes(), ["data.tissue=otsu"], "data.tissue reads windows of images"),
    (
        Windows((4, 20, 16)),
        ["data.patches={size: [2, 8, 8]}", "data.tissue=otsu"],
        "data.tissue is of slides and data.name=dig",
    ),
    (Windows(labels="class"), ["data.patches={size: [8, 8]}", "data.tissue=otsu"], "no slide to train on has tissue"),
    (Windows(bad=(1,)), ["data.patches={size: [8, 8], evaluate: whole}"], "cannot read image 1"),
]


@pytest.mark.parametrize(("images", "settings", "told"), REFUSED)
def test_what_does_not_fit_is_refused(images, settings, told):
    with pytest.raises((ValueError, AgreedError)) as caught:
        sampled(asked(*settings), dataset(images), ALONE, ignore=None)
    assert told in str(caught.value)


def test_layers_are_sampled_and_covered_where_no_patch_reaches_beyond_an_image():
    found = sampled(asked("data.patches={size: [10, 8], per_image: 4}"), dataset(), ALONE, ignore=None)
    assert (len(found.dataset.train), len(found.dataset.evaluate)) == (12, 12)
    assert found.dataset.evaluate.read(0)[1].shape == (2, 10, 8)
    assert "50 %" not in found.reasons[0] and "which 0 images have" in found.reasons[0]


def test_of_a_run_alone_nothing_is_sampled():
    empty = dataset(type("Nothing", (), {"__len__": lambda self: 0})())
    assert sampled(asked("data.patches={size: [8, 8]}"), empty, ALONE, ignore=None).dataset is empty


VOLUMES = """
model: {name: unet, options: {widths: [4, 6]}}
data: {name: volume, batch_size: 4, workers: 0, options: {size: [10, 22, 17], volumes: [3, 2], vessels: 1, blobs: 1}}
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.05}
schedule: {name: constant, length: 20step}
evaluate: {every: 20step}
precision: float64
log: {tensorboard: false}
"""


def go(mesh, folder: Path, settings: list[str]) -> str:
    return train(parse_config(VOLUMES, settings), folder, mesh.world).reason


COVERING, DRAWN = "{size: [6, 12, 9], draw: cover}", "{size: [6, 12, 9], per_image: 3}"


@pytest.mark.long
@pytest.mark.parametrize("patches", few([COVERING, DRAWN], COVERING, is_sweep=True))
def test_volumes_train_on_patches_as_on_one_rank(patches, tmp_path):
    settings = [f"data.patches={patches}", "mesh.replicate=1"]
    assert train(parse_config(VOLUMES, settings), tmp_path / "one", World()).reason == "complete"
    assert on_ranks(2, go, tmp_path / "two", [*settings, "mesh.space=[2,1,1]"]) == ["complete"] * 2
    check_same_numbers(tmp_path / "one", tmp_path / "two")
