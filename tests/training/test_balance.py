"""Are classes weighted and samples drawn as asked, from the data alone, the same on any number of ranks and after a stop?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import RunConfig, parse_config
from widefield.data import BadImageError, Dataset
from widefield.data.counts import class_counts
from widefield.data.order import Steps, TrainSampler, order_of, repeats_in
from widefield.plans import Plan
from widefield.training.assemble import assemble as assembled
from widefield.training.assemble import learner_of, training_batches
from widefield.training.balance import balanced, class_weights_of, sample_weights_of, task_of
from widefield.training.given import NOTHING

ALONE = Mesh(Plan(), World(), torch.device("cpu"))
CONFIG = """
model: {name: resnet}
data: {name: page, batch_size: 4, workers: 0}
optimizer: {name: sgd, lr: 0.1}
schedule: {name: constant, length: 3step}
"""


@dataclass(frozen=True)
class Rare:
    """Class 1 is every fifth sample; `labels` says what targets are."""

    labels: str = "class"
    count: int = 20
    bad: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        if index in self.bad:
            raise BadImageError(f"cannot read rare/{index}")
        image, is_rare = torch.full((1, 8, 8), index, dtype=torch.uint8), int(index % 5 == 0)
        if self.labels == "class":
            return image, is_rare
        if self.labels == "classes":
            return image, torch.tensor([is_rare, 1 - is_rare if index else 0, 0], dtype=torch.uint8)
        target = torch.zeros(8, 8, dtype=torch.uint8)
        target[0], target[1, 0] = 255, is_rare
        return image, target

    def name_of(self, index: int) -> str:
        return f"rare/{index}"


@dataclass(frozen=True)
class Weighed(Rare):
    weights: tuple[float, ...] = ()

    def weight_of(self, index: int) -> float:
        return self.weights[index]


def config(*settings: str) -> RunConfig:
    return parse_config(CONFIG, settings)


def dataset(images: Rare) -> Dataset:
    names = ["a", "b", "c"] if images.labels == "classes" else ["a", "b"]
    return Dataset(images, images, names, 1, [0.5], [0.25], in_memory=True, labels=images.labels)


def weights_on(mesh: Mesh, labels: str) -> tuple[list[float], str | None]:
    weights, why = class_weights_of(
        config("task.class_weights=balanced"), dataset(Rare(labels)), mesh, labels=labels, ignore=255
    )
    return weights.tolist(), why


@pytest.mark.parametrize(
    ("labels", "wanted", "told"),
    [
        ("class", [20 / (2 * 16), 20 / (2 * 4)], "task.class_weights=balanced: a 0.625 (16 samples), b 2.5 (4 samples)"),
        ("classes", [16 / 4, 4 / 16, 1.0], "a 4 (4 samples), b 0.25 (16 samples), c 1 (0 samples)"),
        ("pixels", [1120 / (2 * 1116), 1120 / 8], "a 0.5018 (1,116 pixels), b 140 (4 pixels)"),
    ],
)
def test_balanced_weights_are_the_same_on_any_number_of_ranks(labels, wanted, told):
    for weights, why in [weights_on(ALONE, labels), *on_ranks(3, weights_on, labels)]:
        assert weights == pytest.approx(wanted, rel=1e-12) and told in why


def test_weights_are_given_by_name_or_as_a_list():
    for asked in ("{b: 3}", "[1, 3]"):
        weights, why = class_weights_of(
            config(f"task.class_weights={asked}"), dataset(Rare()), ALONE, labels="class", ignore=None
        )
        assert weights.tolist() == [1, 3] and why is None


@pytest.mark.parametrize(
    ("asked", "labels", "told"),
    [
        ("{d: 3}", "class", "task.class_weights names 'd' and the classes are a, b; mend the name"),
        ("[1, 2, 3]", "class", "has 3 numbers that add up to 6 and there are 2 classes; give one for each"),
        ("[0, 0]", "class", "has 2 numbers that add up to 0 and there are 2 classes"),
        ("balanced", "values", "task.class_weights is balanced and the task learns numbers, which have no classes"),
    ],
)
def test_weights_that_do_not_fit_are_refused(asked, labels, told):
    with pytest.raises(ValueError, match=told):
        class_weights_of(config(f"task.class_weights={asked}"), dataset(Rare()), ALONE, labels=labels, ignore=None)


def unreadable(mesh: Mesh) -> str:
    with pytest.raises(AgreedError) as caught:
        sample_weights_of(config("data.sampling=balanced"), dataset(Rare(bad=(19,))), mesh, labels="class")
    return str(caught.value)


def test_what_one_rank_cannot_read_ends_all():
    assert on_ranks(2, unreadable) == ["rank 1: cannot read rare/19"] * 2
    images = Rare(bad=(19,))
    assert class_counts(images, range(20), labels="class", classes=2, skip=True).tolist() == [15, 4, 19]


# ---------------------------------------------------------------------------------------------- drawing


def test_every_class_is_drawn_equally_often_and_an_epoch_keeps_its_length():
    weights = sample_weights_of(config("data.sampling=balanced"), dataset(Rare()), ALONE, labels="class")
    drawn = torch.cat([order_of(0, epoch, 20, weights) for epoch in range(500)])
    assert len(drawn) == 10_000
    assert float((drawn % 5 == 0).double().mean()) == pytest.approx(0.5, abs=0.02)  # 4 standard deviations


def test_samples_of_several_classes_weigh_as_much_as_their_classes():
    table = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 0]], dtype=torch.uint8)
    assert balanced(table).tolist() == [0.5, 1.5, 0.5, 0.5], "those without any are a class of their own"


def test_a_sample_of_weight_0_is_never_drawn():
    images = Weighed(weights=(0.0, *[1.0] * 18, 0.0))
    weights = sample_weights_of(config("data.sampling=weights"), dataset(images), ALONE, labels="class")
    drawn = torch.cat([order_of(1, epoch, 20, weights) for epoch in range(200)])
    assert set(drawn.tolist()) == set(range(1, 19))


def test_without_weights_the_order_is_what_it_was():
    assert sorted(order_of(3, 2, 20).tolist()) == list(range(20))
    assert sample_weights_of(config(), dataset(Rare()), ALONE, labels="class") is None


def test_ranks_and_a_stop_change_nothing_of_what_is_drawn():
    weights = balanced(torch.tensor([[1, 0]] * 9 + [[0, 1]] * 2, dtype=torch.uint8))

    def keys(ranks: int, first: int, last: int) -> list[list]:
        share = {"seed": 5, "passes": 2, "multiple": 1, "weights": weights}
        samplers = [
            TrainSampler(Steps(11, 4), first=first, last=last, rank=rank, ranks=ranks, **share) for rank in range(ranks)
        ]
        parts = zip(*samplers, strict=True)
        return [[key for keys in part for key in keys if key.real] for part in parts]

    whole = keys(1, 0, 6)
    assert keys(3, 0, 6) == whole and keys(2, 3, 6) == whole[6:]
    assert sum(map(len, whole)) == 22 and max(key.repeat for part in whole for key in part) > 0


def test_an_image_that_is_drawn_again_is_augmented_anew():
    order = torch.tensor([2, 0, 2, 2])
    assert repeats_in(order).tolist() == [0, 0, 1, 2]
    weights = torch.zeros(20, dtype=torch.float64)
    weights[3] = 1
    images = Weighed(weights=tuple(weights.tolist()))
    parts = assembled(config("data.sampling=weights"), ALONE, dataset(images))
    (batch,) = training_batches(parts, first=0, last=1)
    assert batch.index.tolist() == [3] * 4 and len(set(batch.seeds)) == 4


@pytest.mark.parametrize(
    ("settings", "images", "told"),
    [
        (["data.sampling=weights"], Rare(), "data.sampling=weights and data.name=page has no weights of samples; take a"),
        (["data.sampling=weights"], Weighed(weights=(1.0, -1.0) * 10), "and that of rare/1 is -1.0; mend the manifest"),
        (["data.sampling=weights"], Weighed(weights=(0.0,) * 20), "and they are all 0; mend the manifest"),
        (["data.sampling=balanced", "task.name=segmentation", "model.name=unet"], Rare("pixels"),
         "data.sampling=balanced draws samples by their class and the labels of data.name=page are 'pixels'; take"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_weighed_are_refused_before_the_first_step(settings, images, told):
    parts = assembled(config(*settings), ALONE, dataset(images))
    with pytest.raises(ValueError, match=told):
        learner_of(parts)


def test_the_metadata_of_a_run_is_enough_to_predict_without_its_images_and_its_loss():
    nothing = replace(dataset(Rare()), train=Rare(count=0))
    asked = config("task.class_weights=balanced", "task.loss=<__main__.hinge>")
    task, why = task_of(asked, NOTHING, nothing, ALONE)
    assert task.loss_sum(torch.zeros(1, 2), torch.tensor([0])).item() == pytest.approx(0.6931, abs=1e-4) and why is None
