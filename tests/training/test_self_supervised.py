"""Does learning from two views follow the authors' formula on the whole batch, and under every plan as on one rank?"""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, SWEEP_ON_CPU
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe
from torch import Tensor
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import ShardingConfig, StreamConfig
from widefield.data.order import Key
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.evaluation import Evaluation
from widefield.training.example_pass import trial_step

CPU = torch.device("cpu")
SMALL = ["data.workers=0", "data.batch_size=5", "data.evaluate_batch_size=64", "precision=float64",
         "data.augment=[{RandomCrop: {size: [9, 7], padding: 1}}, {RandomErasing: {p: 0.5}}]",
         "model.options.backbone_options={widths: [4, 8], blocks: 1}", "model.options.projector=[6, 5]"]  # fmt: skip
UNEVEN = ["data.batch_size=3", "gradient.accumulate=2", "ema={decay: 0.9}", "optimizer.clip_norm=1"]
"""Three samples in passes of two and one, so that on two copies one has none in the second pass."""


def scores(found: Evaluation) -> list[float]:
    return [*(found.metrics[name] for name in ("correlation", "std")), found.loss]


RECIPE = SmallRecipe("digits_views", SMALL, scores)


# ---------------------------------------------------------------------------------------------- by hand


def vicreg(one: Tensor, other: Tensor) -> Tensor:
    """As the authors' main_vicreg.py has it, with its weights."""

    def of_view(z: Tensor) -> Tensor:
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        off_diagonal = covariance - covariance.diag().diag()
        return 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2 + off_diagonal.square().sum() / z.shape[1]

    return 25 * F.mse_loss(one, other) + of_view(one) + of_view(other)


def by_hand(steps: int) -> list[float]:
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    learner, _ = learner_of(parts)  # for its learning rate alone
    model, batches, prepare = parts.model, training_batches(parts, first=0, last=steps), parts.preparation(train=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1e-4), []
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.ndim >= 2]
    optimizer.add_param_group({"params": no_decay, "weight_decay": 0.0})
    for step in range(steps):
        learner.step = step
        for group in optimizer.param_groups:
            group["lr"] = learner.lr_now()
        image, _ = prepare(next(batches))
        features = model.backbone(torch.cat([image[:, :1], image[:, 1:]]))
        loss = vicreg(*model.projector(features).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_steps_are_a_loop_by_hand_with_the_authors_formula():
    assert RECIPE.alone(5)[:5] == pytest.approx(by_hand(5), rel=1e-10)


# ---------------------------------------------------------------------------------------------- plans


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        pytest.param(Plan(replicate=3), marks=SWEEP_ON_CPU),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=SWEEP_ON_CPU),
        Plan(shard=2),
        pytest.param(Plan(shard=2, sharding=ShardingConfig(zero=1)), marks=SWEEP_ON_CPU),
        Plan(channel=2),
    ],
    ids=str,
)
def test_steps_of_the_recipe_are_those_of_one_rank(plan):
    wanted, uneven = RECIPE.alone(6), RECIPE.alone(3, *UNEVEN)
    assert len(set(wanted)) == len(wanted)
    for found, of_uneven in on_ranks(plan.ranks, both, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8) and of_uneven == pytest.approx(uneven, rel=1e-8)


OF_MY_OWN = ["model.options={backbone: 'backbones:SharedAndUnused', projector: [6, 5]}", "model.freeze=['backbone.stem']"]


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1]), Plan(shard=2)], ids=str)
def test_a_backbone_with_dropout_and_shared_unused_and_frozen_parameters(plan):
    wanted = RECIPE.alone(3, *OF_MY_OWN)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 3, *OF_MY_OWN, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


def both(mesh: Mesh) -> tuple[list[float], list[float]]:
    return RECIPE.numbers(mesh, 6), RECIPE.numbers(mesh, 3, *UNEVEN)


@LONG_ON_CPU
@on_gpu_too
def test_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    assert RECIPE.alone(6, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(RECIPE.alone(6), rel=1e-8)


# ---------------------------------------------------------------------------------------------- views


def test_views_are_two_draws_of_the_samples_own_seeds_and_an_evaluation_draws_the_same_again():
    parts = assemble(RECIPE.config("seed=3"), Mesh(ALONE, World(), CPU))
    reader, first, again = parts.reader(train=True), Key(0, 0, 7), Key(1, 0, 7)
    batch = reader.__getitems__([first, Key(0, 1, 8)])
    assert batch.image.shape == (2, 2, 9, 7) and not torch.equal(batch.image[:, 0], batch.image[:, 1])
    alone = reader.__getitems__([first]).image[0]
    assert torch.equal(alone, batch.image[0]) and not torch.equal(alone, reader.__getitems__([again]).image[0])
    one, other = (next(parts.evaluation_batches()).image for _ in range(2))
    assert torch.equal(one, other) and not torch.equal(one[:, 0], one[:, 1])


def test_a_dim_without_spread_counts_as_uncorrelated_and_two_images_are_enough():
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    metrics = parts.task.metrics()
    metrics.update(torch.tensor([[[1.0, 5.0]] * 2]), torch.zeros(1))
    metrics.update(torch.tensor([[[3.0, 5.0]] * 2]), torch.zeros(1))
    assert {name: float(value) for name, value in metrics.compute().items()} == {"correlation": 0.5, "std": 0.5}


@pytest.mark.parametrize("space", [[1, 1], pytest.param([2, 1], marks=pytest.mark.long)], ids=str)
def test_a_step_is_emulated_without_data(space):
    """As the planner does it, on images of zeros."""
    given = stand_in_data((1, 32, 24), classes=3, samples=4)
    found = emulated_step(RECIPE.config(f"mesh.space={space}"), ranks=space[0], given=given)
    assert found.peak_bytes > 10**4


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["data.augment=[]"], ValueError, r"data.augment is empty and task.name=self_supervised learns from two random views"),
        (["data.mixup=0.2"], ValueError, r"data.mixup=0.2 mixes images and task.name=self_supervised learns from two"),
        (["data={name: scene, options: {pairs: true}, augment: [RandomHorizontalFlip]}"], NotImplementedError,
         r"data.name=scene has images as targets and task.name=self_supervised"),
        (["task.metrics=[f1]"], ValueError, r"task.metrics has 'f1' and the task learns from views, which have the task's own"),
        (["task.class_weights=balanced"], ValueError, r"task.class_weights is balanced and the task learns without labels"),
        (["task.loss=mse"], ValueError, r"task.loss=mse is for targets of the kinds values, image .* 'views'; take .* vicreg"),
        (["task.loss_options={variance: -1}"], ValueError, r"variance is -1; a number of 0 or more is wanted, as the 25"),
        (["task.loss_options={lambda: 1}"], ValueError, r"task.loss_options \{'lambda': 1\} do not fit 'vicreg'"),
        (["model={name: resnet}"], ValueError, r"self_supervised learns from two views .*model.options.backbone=resnet"),
        (["model.options.projector=[]"], ValueError, r"model.options.projector is \[\]; whole numbers above 0"),
        (["model.options.projector=64"], ValueError, r"model.options.projector is 64; a list of widths is wanted"),
        (["model.options={backbone: unet}"], ValueError, r"backbone=unet has no fully connected layer that could be left out"),
        (["model.options.head=fc"], ValueError, r"no fully connected layer fc that could be left out \(they are head\)"),
        (["model.options={backbone: 'backbones:of_channels', projector: [4]}"], ValueError,
         r"without its last fully connected layer gives \(4, 4, 35\) and \(4, 35\) is wanted"),
        (["mesh.stage=2"], NotImplementedError, r"task.loss=vicreg is computed from all images of a pass together"),
        (["task.name=classification"], ValueError, r"wants an output of shape \(2, 10\) and the model gave \(2, 1, 5\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told):
    config = RECIPE.config(*settings)
    with pytest.raises(error, match=told):
        trial_step(learner_of(assemble(config, Mesh(Plan(stage=config.mesh.stage), World(), CPU)))[0])


def test_views_of_two_sizes_are_refused():
    parts = assemble(RECIPE.config("data.augment=['backbones:cut_anyhow']"), Mesh(ALONE, World(), CPU))
    problem = parts.reader(train=True).__getitems__([Key(0, 0, 0)]).problem
    assert "two views of an image are (1, " in problem and "let data.read end in a transform" in problem


def test_a_loss_of_ones_own_is_of_each_sample():
    wanted = RECIPE.alone(2, "task.loss=backbones:distance")
    for found in on_ranks(2, RECIPE.numbers, 2, "task.loss=backbones:distance"):
        assert found == pytest.approx(wanted, rel=1e-8)
