"""Do volumes of one's own train, evaluate and predict from a Python program, with each kind of labels and each dtype?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import widefield as wf
from widefield.comm.mesh import AgreedError
from widefield.data import spacing_of
from widefield.data.map_style import dataset_of
from widefield.data.statistics import statistics_of
from widefield.training.run_folder import read_model

SIZE, CLASSES = (5, 9, 7), ["a", "b", "c"]
TASKS = {
    "class": "classification", "classes": "multilabel", "values": "regression", "pixels": "segmentation",
    "layers": "multilabel_segmentation",
}  # fmt: skip
SHORT = {"schedule": {"name": "constant", "length": "3step"}, "log": {"tensorboard": False}}


@dataclass
class Volumes:
    """Noise; targets of a kind, or what `target` gives for an index."""

    kind: str = "pixels"
    dtype: torch.dtype = torch.uint8
    count: int = 6
    size: tuple[int, ...] = SIZE
    target: Any = None
    classes: list[str] = field(default_factory=lambda: list(CLASSES))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 200, (2, *self.size), generator=generator).to(self.dtype)
        targets = {
            "class": index % 3,
            "classes": torch.tensor([index % 2, 1, 0]),
            "values": torch.randn(3, generator=generator),
            "pixels": torch.randint(0, 3, self.size, generator=generator),
            "layers": torch.randint(0, 2, (3, *self.size), generator=generator).bool(),
        }
        return image, targets[self.kind] if self.target is None else self.target


def net(kind: str) -> nn.Module:
    """Convolutions whose last gives an answer for each voxel, or for each volume."""
    torch.manual_seed(0)
    first = [nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()]
    if kind in ("pixels", "layers"):
        return nn.Sequential(*first, nn.Conv3d(4, 3, 1))
    return nn.Sequential(*first, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3))


def trained(folder: Path, kind: str, dtype: torch.dtype = torch.uint8, *settings: str, **passed: Any):
    config = {"data": {"batch_size": 2, "workers": 0}, "task": {"name": TASKS[kind]}, "mesh": {"replicate": 1}, **SHORT}
    objects = {"model": net(kind), "data": (Volumes(kind, dtype), Volumes(kind, dtype, 3))} | passed
    return wf.train(config, *settings, run=folder, **objects)


# ---------------------------------------------------------------------------------------------- from start to end


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_of_labels_trains_evaluates_and_predicts(kind, tmp_path):
    outcome = trained(tmp_path / "run", kind)
    assert outcome.reason == "complete" and (outcome.evaluation.images, outcome.evaluation.labels) == (3, kind)
    stored = read_model(tmp_path / "run")
    assert (stored.dims, stored.labels, stored.evaluate.shape) == (3, kind, [2, *SIZE])
    again = wf.evaluate(tmp_path / "run", model=net(kind), data=Volumes(kind, count=3))
    assert again.metrics == outcome.evaluation.metrics and again.confusion == outcome.evaluation.confusion
    (answer,) = wf.predict(tmp_path / "run", Volumes(kind)[0][0], model=net(kind))
    pixels = {"pixels": SIZE, "layers": (3, *SIZE)}.get(kind)
    assert answer.pixels is None if pixels is None else tuple(answer.pixels.shape) == pixels
    assert "Evaluated images" in (text := (tmp_path / "run/report.html").read_text()) or pixels is None
    assert text.count("<img") > 0


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float32, torch.float64], ids=str)
def test_every_dtype_trains(dtype, tmp_path):
    outcome = trained(tmp_path / "run", "pixels", dtype, "data.intensity=zscore", "data.augment=[RandomDepthFlip]")
    assert outcome.reason == "complete" and read_model(tmp_path / "run").dtype == dtype
    assert sum(map(sum, outcome.evaluation.confusion)) == 3 * 5 * 9 * 7


def test_each_volume_may_be_scaled_by_its_own_moments(tmp_path):
    assert trained(tmp_path / "run", "pixels", torch.int16, "data.intensity=image", "model.channels_last=true")


def test_our_networks_are_built_for_the_dims_of_the_data(tmp_path):
    options = {"model": None}
    for kind, name in (("pixels", "unet"), ("class", "resnet"), ("pixels", "monai/SegResNet")):
        folder = tmp_path / name.replace("/", "_")
        sizes = {"unet": "widths=[4, 6]", "resnet": "widths=[4]"}.get(name, "init_filters=8")
        key, _, value = sizes.partition("=")
        settings = [f"model.name={name}", f"model.options={{{key}: {value}}}"]
        data = (Volumes(kind, size=(8, 16, 8)), Volumes(kind, count=2, size=(8, 16, 8)))
        assert trained(folder, kind, torch.uint8, *settings, data=data, **options).reason == "complete"


# ---------------------------------------------------------------------------------------------- what a dataset is


@pytest.mark.parametrize("kind", TASKS)
def test_the_kind_of_labels_follows_from_the_dims_of_the_image(kind):
    found = dataset_of(Volumes(kind), Volumes(kind))
    assert (found.labels, found.dims, found.channels, found.moves_as_one) == (kind, 3, 2, True)


def test_images_whose_labels_have_as_many_dims_are_told_from_volumes():
    image, labels = torch.zeros(3, 9, 7), torch.zeros(3, 9, 7, dtype=torch.int64)
    assert dataset_of([(image, labels)], [(image, labels)], classes=3).labels == "layers"
    assert dataset_of([(image[None], labels)], [(image[None], labels)], classes=3).labels == "pixels"


class Spaced(Volumes):
    spacing = (2.5, 1, 0.7)


class EachSpaced(Volumes):
    def spacing_of(self, index: int) -> list[float]:
        return [1.0, 2.0, 3.0 + index]


def test_a_dataset_may_say_the_lengths_of_a_voxel():
    found = [dataset_of(kind(), kind()).evaluate for kind in (Spaced, EachSpaced, Volumes)]
    assert [spacing_of(images, 2) for images in found] == [(2.5, 1.0, 0.7), (1.0, 2.0, 5.0), None]
    odd = Spaced()
    odd.spacing = (1, 0, 1)
    with pytest.raises(ValueError, match=r"evaluate\[1\] has the spacing \[1.0, 0.0, 1.0\]; give a length above 0 for each"):
        spacing_of(dataset_of(odd, odd).evaluate, 1)


def test_surface_distances_are_in_the_spacing_of_each_volume(tmp_path):
    """One voxel, answered four planes off: four times the depth of a voxel."""
    truth = torch.zeros(SIZE, dtype=torch.int64)
    truth[0, 4, 4] = 1

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, image: Tensor) -> Tensor:
            answer = image.new_zeros(len(image), 3, *SIZE)
            answer[:, 0], answer[:, 1, 4, 4, 4] = 1, 2
            return answer * self.scale

    settings = ["task.metrics=[surface]", "optimizer.lr=1.0e-9", "optimizer.weight_decay=0"]
    for kind, depth in ((Volumes, 1.0), (Spaced, 2.5)):
        data = (kind(target=truth), kind(count=1, target=truth))
        folder = tmp_path / str(depth)
        found = trained(folder, "pixels", torch.float32, *settings, model=Constant(), data=data).evaluation
        assert found.columns["hd95"][1] == pytest.approx(4 * depth) and found.columns["asd"][1] == pytest.approx(4 * depth)


def test_statistics_are_of_all_voxels():
    images = dataset_of(Volumes(dtype=torch.int16), Volumes(dtype=torch.int16)).train
    found = statistics_of(images, channels=2, dtype=torch.int16, labels="pixels")
    voxels = np.stack([Volumes(dtype=torch.int16)[index][0].numpy() for index in range(6)])
    assert found.sizes == {SIZE: 6} and found.channels[1].mean == pytest.approx(voxels[:, 1].mean(), rel=1e-12)
    assert found.to_tree()["sizes"] == [[*SIZE, 6]] and sum(found.labels.values()) == 6 * 5 * 9 * 7


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (torch.zeros(9, 7, dtype=torch.int64), "(D, H, W) or (K, D, H, W) integers for pixels, (K,) integers"),
        (torch.zeros(5, 9, 7), "has labels of shape (5, 9, 7) and torch.float32 and an image of shape (2, 5, 9, 7)"),
        (torch.zeros(1, 1, 5, 9, 7, dtype=torch.uint8), "has labels of shape (1, 1, 5, 9, 7)"),
        (torch.full((3, 5, 9, 7), 4), "has 4 among labels of shape (3, 5, 9, 7); 0 and 1 are wanted"),
        (torch.zeros(5, 9, 7, dtype=torch.bool), "a class number, or whole numbers for its pixels, are wanted"),
    ],
)
def test_labels_that_fit_no_volume_are_refused_in_words(target, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        dataset_of(Volumes(target=target), Volumes(target=target))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (torch.zeros(4, 9, 7, dtype=torch.int64), "the labels of train[0] are 4 x 9 x 7 pixels and its image is 5 x 9 x 7"),
        (torch.zeros(2, 5, 9, 7, dtype=torch.uint8), "train[0] has 2 labels and the classes are 3; give one per class"),
        (torch.full(SIZE, 3), "the label of train[0] is 3, outside 0..2"),
    ],
)
def test_labels_of_another_size_or_class_name_their_volume(target, told, tmp_path):
    kind = "layers" if target.ndim == 4 else "pixels"
    with pytest.raises(AgreedError, match=re.escape(told)):
        trained(tmp_path / "run", kind, data=(Volumes(target=target), Volumes(target=target)))


def test_a_volume_without_channels_is_told_how_to_have_one():
    labels = torch.randint(0, 3, (5, 9, 7))
    with pytest.raises(ValueError, match=r"0 and 1 are wanted; of a volume give the image as \(1, D, H, W\)"):
        dataset_of([(torch.zeros(5, 9, 7), labels)], [(torch.zeros(5, 9, 7), labels)], classes=3)


def test_an_image_of_other_dims_than_the_first_is_named():
    mixed = [Volumes()[0], (torch.zeros(2, 9, 7, dtype=torch.uint8), torch.zeros(9, 7, dtype=torch.int64))]
    images = dataset_of(mixed, mixed, classes=3).train
    with pytest.raises(ValueError, match=r"train\[1\] differs from the first image: dims: 2, there 3"):
        images.read(1)
    with pytest.raises(ValueError, match="uint8 volumes of 2 channels with labels of pixels to train on and uint8 images of"):
        dataset_of(mixed, mixed[1:], classes=3)


def test_images_of_five_dims_are_refused():
    with pytest.raises(
        ValueError, match=r"\(C, H, W\) is wanted, as \(1, 28, 28\) for a grey one, or \(C, D, H, W\) of a volume"
    ):
        dataset_of([(torch.zeros(1, 2, 3, 4, 5), 0)], [(torch.zeros(1, 2, 3, 4, 5), 0)], classes=2)
