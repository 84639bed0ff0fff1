"""Does learning from two views follow the authors' formula on the whole batch, and under every plan as on one rank?"""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import ShardingConfig, StreamConfig
from widefield.data.order import Key
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.evaluation import Evaluation

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


@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        pytest.param(Plan(replicate=3), marks=pytest.mark.long),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=pytest.mark.long),
        Plan(shard=2),
        pytest.param(Plan(shard=2, sharding=ShardingConfig(zero=1)), marks=pytest.mark.long),
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


@on_gpu_too
def test_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    assert RECIPE.alone(6, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(RECIPE.alone(6), rel=1e-8)
