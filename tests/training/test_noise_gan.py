"""Does a network that makes images of noise learn as in a loop by hand, and under every plan as on one rank?"""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import ShardingConfig, StreamConfig
from widefield.data.device import noise_of_seed
from widefield.data.order import Key
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.evaluation import Evaluation

CPU = torch.device("cpu")
SMALL = [
    "data.workers=0", "data.batch_size=6", "data.evaluate_batch_size=90", "precision=float64", "mesh.replicate=1", "ema=null",
    "data.read=[{Resize: {size: [16, 16]}}]", "data.read_evaluate=[{Resize: {size: [16, 16]}}]", "task.metrics=[{swd: {levels: 1}}]",
    "model.options.generator_options={width: 4, strides: 2}", "task.options.noise=8",
    "model.options.discriminator_options={width: 4, strides: 2, spectral: true, normalized: true}",
]  # fmt: skip
AS_MAPS = [
    "task.options.noise=[3, 4, 4]", "model.options.generator_options={width: 4, strides: 2, start: null}",
    "model.options.discriminator_options={width: 4, strides: 2, start: null}",
]  # fmt: skip
"""Noise that is a map, and scores of overlapping patches."""


def scores(found: Evaluation) -> list[float]:
    return [*(found.metrics[name] for name in ("distance", "spread", "swd")), found.loss]


RECIPE = SmallRecipe("digits_gan", SMALL, scores)


# ---------------------------------------------------------------------------------------------- by hand


def test_noise_depends_on_the_seed_the_epoch_and_the_image_alone():
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    batch = next(training_batches(parts, first=241, last=242))
    noise, target = parts.preparation(train=True)(batch)
    keys = [Key(1, 0, int(index)) for index in batch.index]
    wanted = [noise_of_seed(key.seed(parts.config.seed, "augment"), (8, 1, 1)).double() for key in keys]
    assert torch.equal(noise, torch.stack(wanted)) and noise.std() > 0.5
    assert torch.equal(target, batch.image.double() / 255)


def by_hand(steps: int) -> list[float]:
    """The recipe as a plain loop with two optimizers: DCGAN's losses of logits, a mean over images each."""
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    model, batches, prepare = parts.model, training_batches(parts, first=0, last=steps), parts.preparation(train=True)
    generator, discriminator = model.generator, model.discriminator
    adam = {"lr": parts.config.optimizer.lr, "betas": tuple(parts.config.optimizer.betas), "weight_decay": 0.0}
    of_d, of_g = (torch.optim.AdamW(module.parameters(), **adam) for module in (discriminator, generator))
    losses = []
    for _ in range(steps):
        noise, real = prepare(next(batches))
        with torch.no_grad():
            made = generator(noise)
        loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made)).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = F.softplus(-discriminator(generator(noise))).mean()
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        losses += [loss_d.item() + loss_g.item(), loss_d.item(), loss_g.item()]
    return losses


def test_turns_are_a_loop_by_hand():
    assert RECIPE.alone(5)[:15] == pytest.approx(by_hand(5), rel=1e-10)


# ---------------------------------------------------------------------------------------------- plans


@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=pytest.mark.long),
        Plan(shard=2),
        pytest.param(Plan(shard=2, sharding=ShardingConfig(zero=1)), marks=pytest.mark.long),
        Plan(channel=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", [[], AS_MAPS], ids=["vector", "map"])
def test_twenty_steps_are_those_of_one_rank(plan, asked):
    wanted = RECIPE.alone(20, *asked)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 20, *asked, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


@on_gpu_too
@pytest.mark.parametrize("asked", [[], AS_MAPS], ids=["vector", "map"])
def test_twenty_steps_in_a_stream_are_those_of_one_rank(asked):
    plan = Plan(stream=StreamConfig(tiles=[2, 2]))
    assert RECIPE.alone(20, *asked, plan=plan) == pytest.approx(RECIPE.alone(20, *asked), rel=1e-8)
