"""Does detection learn under every plan as on one rank, and are its boxes and scores the same?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, StreamConfig, read_config
from widefield.plans import Plan
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches

RECIPE = Path(__file__).parents[2] / "recipes/page_detection.yaml"
CPU, ALONE = torch.device("cpu"), Plan()
SMALL = [
    "data.options.size=[77, 91]", "data.options.pages=[6, 5]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "data.options.digits_per_megapixel=250", "task.options.score=0.02",
    "model.options.width=8",
]  # fmt: skip
FCOS = ["task.options={method: fcos, strides: [8, 16], score: 0.02}", "model.name=fcos",
        "model.options={backbone: small, strides: [8, 16], width: 4, features: 32, convolutions: 1}"]  # fmt: skip
BOTH = pytest.mark.parametrize("settings", [[], FCOS], ids=["retinanet", "fcos"])


def config(*settings: str) -> RunConfig:
    return read_config(str(RECIPE), [*SMALL, *settings])


def numbers_of(mesh: Mesh, steps: int, *settings: str) -> list[float]:
    """The losses of some steps of the recipe, then the scores of an evaluation, those of each class, and its loss."""
    parts = assemble(config(*settings), mesh)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=steps)
    losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(steps)]
    found = evaluate_parts(parts, learner.model)
    assert (found.images, found.duplicates, found.gathered) == (5, 0, ["coco"])
    return [*losses, found.loss, *found.metrics.values(), *found.columns["ap"], *found.columns["boxes"]]


def alone(steps: int, *settings: str, plan: Plan = ALONE) -> list[float]:
    return numbers_of(Mesh(plan, World(), CPU), steps, *settings)


# ---------------------------------------------------------------------------------------------- plans


@BOTH
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=pytest.mark.long),
        Plan(shard=2),
        pytest.param(Plan(replicate=3), marks=pytest.mark.long),
        pytest.param(Plan(replicate=2, space=[2, 1]), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ten_steps_of_the_recipe_are_those_of_one_rank(plan, settings):
    """Pages of 77 x 91 px, some without a digit; steps of two images, so that of three copies one has none."""
    wanted = alone(10, *settings)
    for found in on_ranks(plan.ranks, numbers_of, 10, *settings, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8, nan_ok=True)


@BOTH
def test_ten_steps_of_the_recipe_in_a_stream_are_those_of_one_rank(settings):
    stream = Plan(stream=StreamConfig(tiles=[2, 2]))
    assert alone(10, *settings, plan=stream) == pytest.approx(alone(10, *settings), rel=1e-8, nan_ok=True)
