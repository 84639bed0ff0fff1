"""Does detection learn under every plan as on one rank, and are its boxes and scores the same?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, SWEEP_ON_CPU
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe

from widefield import tasks
from widefield.comm.mesh import Mesh, World
from widefield.config import StreamConfig
from widefield.data import BadImageError
from widefield.detection.anchor_heads import AnchorHeads
from widefield.geometry.box import full_box
from widefield.planner.search.ask import image_of
from widefield.plans import Plan
from widefield.tasks.detection import build
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.balance import check_stages
from widefield.training.evaluation import Evaluation
from widefield.training.given import NOTHING

CPU = torch.device("cpu")
SMALL = [
    "data.options.size=[77, 91]", "data.options.pages=[6, 5]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "data.options.digits_per_megapixel=250", "task.options.score=0.02",
    "model.options.width=8",
]  # fmt: skip
FCOS = ["task.options={method: fcos, strides: [8, 16], score: 0.02}", "model.name=fcos",
        "model.options={backbone: small, strides: [8, 16], width: 4, features: 32, convolutions: 1}"]  # fmt: skip
BOTH = pytest.mark.parametrize("settings", [[], FCOS], ids=["retinanet", "fcos"])


def scores(found: Evaluation) -> list[float]:
    """Those of the whole, and of each class."""
    assert found.gathered == ["coco"]
    return [found.loss, *found.metrics.values(), *found.columns["ap"], *found.columns["boxes"]]


RECIPE = SmallRecipe("page_detection", SMALL, scores)


# ---------------------------------------------------------------------------------------------- plans


@on_gpu_too
@BOTH
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=SWEEP_ON_CPU),
        Plan(shard=2),
        pytest.param(Plan(replicate=3), marks=SWEEP_ON_CPU),
        pytest.param(Plan(replicate=2, space=[2, 1]), marks=SWEEP_ON_CPU),
    ],
    ids=str,
)
def test_ten_steps_of_the_recipe_are_those_of_one_rank(plan, settings):
    """Pages of 77 x 91 px, some without a digit; steps of two images, so that of three copies one has none."""
    wanted = RECIPE.alone(10, *settings)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 10, *settings, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8, nan_ok=True)


@LONG_ON_CPU
@on_gpu_too
@BOTH
def test_ten_steps_of_the_recipe_in_a_stream_are_those_of_one_rank(settings):
    stream = Plan(stream=StreamConfig(tiles=[2, 2]))
    assert RECIPE.alone(10, *settings, plan=stream) == pytest.approx(RECIPE.alone(10, *settings), rel=1e-8, nan_ok=True)


@LONG_ON_CPU
@on_gpu_too
@BOTH
def test_channels_on_two_ranks_learn_as_one_rank(settings):
    wanted = RECIPE.alone(3, *settings)
    for found in on_ranks(2, RECIPE.numbers, 3, *settings, plan=Plan(channel=2)):
        assert found == pytest.approx(wanted, rel=1e-8, nan_ok=True)


# ---------------------------------------------------------------------------------------------- frozen parts, bad images


@pytest.mark.long
def test_a_frozen_backbone_learns_on_tiles_as_on_one_rank():
    settings = ["model.freeze=[backbone.body]"]
    wanted = RECIPE.alone(3, *settings)
    for found in on_ranks(2, RECIPE.numbers, 3, *settings, plan=Plan(space=[2, 1])):
        assert found == pytest.approx(wanted, rel=1e-8, nan_ok=True)


def with_a_bad_image(mesh: Mesh) -> tuple[list[float], list[str]]:
    """The losses of three steps, and what was left out, where one page cannot be read."""
    parts = assemble(RECIPE.config("data.bad_images=skip"), mesh)
    parts = replace(parts, dataset=replace(parts.dataset, train=OneUnread(parts.dataset.train)))
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=3)
    losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(3)]
    return losses, [name for names in mesh.gather_objects(learner.skipped) for name in names]


@dataclass(frozen=True)
class OneUnread:
    """A split of which the third image cannot be read."""

    images: Any

    def __len__(self) -> int:
        return len(self.images)

    def name_of(self, index: int) -> str:
        return self.images.name_of(index)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.images.shape(index)

    def read(self, index: int):
        return self.read_window(index, full_box(self.shape(index)[1:]))

    def read_window(self, index: int, window):
        if index == 3:
            raise BadImageError(f"{self.name_of(index)} is cut short")
        return self.images.read_window(index, window)


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1])], ids=str)
def test_an_image_that_cannot_be_read_is_left_out_alike(plan):
    losses, skipped = with_a_bad_image(Mesh(ALONE, World(), CPU))
    assert skipped == ["page/train/3"]
    for found in on_ranks(plan.ranks, with_a_bad_image, plan=plan):
        assert found == (pytest.approx(losses, rel=1e-8), skipped)


# ---------------------------------------------------------------------------------------------- what is told and refused


def reasons_of(mesh: Mesh) -> list[str]:
    parts = assemble(RECIPE.config(), mesh)
    return learner_of(parts)[1]


def test_maps_that_every_rank_has_whole_are_told_with_their_bytes():
    """Of one page of 77 x 91 px in float64: 10 x 12 and 5 x 6 places of 3 anchors with 10 classes and 4 numbers of a box."""
    assert not [why for why in reasons_of(Mesh(ALONE, World(), CPU)) if "maps" in why]
    held = 2 * (10 * 12 + 5 * 6) * 3 * (10 + 4) * 8
    for found in on_ranks(2, reasons_of, plan=Plan(space=[2, 1])):
        (told,) = [why for why in found if "maps of all levels (" in why]
        assert f"({held / 1024:.0f} KiB)" in told and "anchors of all places are matched with the boxes" in told


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["task.options.strides=[8, 32]"], ValueError,
         r"the task wants 2 levels, at 1 maps of .*\(2, 30, 3, 3\).* and the model gives 2, there .*\(2, 30, 5, 6\)"),
        (["task.options.octaves=2"], ValueError, r"at 0 maps of .*\(2, 20, 10, 12\).* there .*\(2, 30, 10, 12\)"),
        (["task.options.method=fcos"], ValueError, r"at 0 maps of .*\(2, 10, 10, 12\)"),
        (["model={name: unet}"], ValueError, r"and the model gives 0, there none"),
    ],
)  # fmt: skip
def test_a_model_that_gives_other_maps_is_refused(settings, error, told):
    with pytest.raises(error, match=told):
        RECIPE.alone(1, *settings)


def test_stages_and_plans_without_boxes_are_refused():
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    with pytest.raises(NotImplementedError, match=r"wants the maps of all levels, and the last of the 2 stages of mesh.stage"):
        check_stages(parts.task, parts.config, SimpleNamespace(plan=Plan(stage=2)))
    with pytest.raises(NotImplementedError, match=r"task.name=detection matches anchors with boxes"):
        image_of(RECIPE.config(), NOTHING)


def test_a_task_of_ones_own_does_not_learn_boxes():
    task = build(num_classes=3)
    with pytest.raises(NotImplementedError, match=r"task=x learns boxes, and that is the task detection's alone"):
        tasks.checked(task, name="task=x", num_classes=3)


def test_low_precision_computes_losses_and_boxes_in_float32(monkeypatch):
    """At 20,000 px a step of bfloat16 is 128 px."""
    seen = []

    def watched(heads, output, *rest):
        seen.extend(one.dtype for level in output for one in level)
        return of_losses(heads, output, *rest)

    of_losses = AnchorHeads.losses
    monkeypatch.setattr(AnchorHeads, "losses", watched)
    parts = assemble(RECIPE.config("precision=bfloat16"), Mesh(ALONE, World(), CPU))
    learner, _ = learner_of(parts)
    loss, _ = learner.learn([next(training_batches(parts, first=0, last=1))], stop=False)
    found = evaluate_parts(parts, learner.model)
    assert set(seen) == {torch.float32} and len(seen) > 8 and loss > 0 and found.images == 5
