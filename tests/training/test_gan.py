"""Does a generative network learn as in a loop by hand with two optimizers, and under every plan as on one rank?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, ShardingConfig, StreamConfig, read_config
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches

RECIPE = Path(__file__).parents[2] / "recipes/scene_gan.yaml"
CPU, ALONE = torch.device("cpu"), Plan()
SMALL = [
    "data.options.size=[32, 24]", "data.options.scenes=[6, 3]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "mesh.space=[]", "task.metrics=[{swd: {levels: 1}}]",
    "model.options.generator_options={width: 4, blocks: 1, strides: 2}",
    "model.options.discriminator_options={width: 4, strides: 2, spectral: true, normalized: true}",
]  # fmt: skip
BATCH_NORM = "model.options={generator: unet, generator_options: {widths: [4, 8]}, discriminator: multiscale}"
PENALTIES = ["task.options.r1=2", "task.options.r2=1", "task.options.gradient_penalty=3", "task.options.penalty_every=2"]


def config(*settings: str) -> RunConfig:
    return read_config(str(RECIPE), [*SMALL, *settings])


def numbers_of(mesh: Mesh, steps: int, *settings: str) -> list[float]:
    """The losses of some steps of the recipe, each member's too, then PSNR, SSIM and the loss of an evaluation."""
    parts = assemble(config(*settings), mesh)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=steps)
    numbers = list[float]()
    for _ in range(steps):
        passes = [next(batches) for _ in range(parts.config.gradient.accumulate)]
        loss, _ = learner.learn(passes, stop=False)
        numbers += [loss, *learner.losses.values()]
    model = learner.model if learner.ema is None else learner.ema.module
    found = evaluate_parts(parts, model)
    assert (found.images, found.duplicates) == (3, 0)
    return [*numbers, *(found.metrics[name] for name in ("psnr", "ssim", "swd")), found.loss]


def alone(steps: int, *settings: str, plan: Plan = ALONE) -> list[float]:
    return numbers_of(Mesh(plan, World(), CPU), steps, *settings)


# ---------------------------------------------------------------------------------------------- by hand


def by_hand(steps: int) -> list[float]:
    """The recipe as a plain loop: two optimizers, hinge losses, feature matching and L1, a mean over images each."""
    parts = assemble(config(), Mesh(ALONE, World(), CPU))
    model, batches, prepare = parts.model, training_batches(parts, first=0, last=steps), parts.preparation(train=True)
    generator, discriminator = model.generator, model.discriminator
    adam = {"lr": 5e-4, "betas": (0.5, 0.99), "weight_decay": 0.0}
    of_d, of_g = (torch.optim.AdamW(module.parameters(), **adam) for module in (discriminator, generator))
    losses = []
    for _ in range(steps):
        image, target = prepare(next(batches))
        target = target.to(image.dtype)
        real = discriminator(image, target)
        fake = discriminator(image, generator(image).detach())
        loss_d = F.relu(1 - real[-1]).mean() + F.relu(1 + fake[-1]).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        made = generator(image)
        judged = discriminator(image, made)
        with torch.no_grad():
            wanted = discriminator(image, target)
        matching = sum(F.l1_loss(a, b) for a, b in zip(judged[:-1], wanted[:-1], strict=True))
        loss_g = -judged[-1].mean() + matching + 10 * F.l1_loss(made, target)
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        losses += [loss_d.item() + loss_g.item(), loss_d.item(), loss_g.item()]
    return losses


def test_turns_are_a_loop_by_hand():
    """Spectral norms iterate once per forward in training mode, by hand as here: two of the discriminator, then two more."""
    assert alone(5)[:15] == pytest.approx(by_hand(5), rel=1e-10)


# ---------------------------------------------------------------------------------------------- plans


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
def test_twenty_steps_of_the_recipe_are_those_of_one_rank(plan):
    wanted = alone(20)
    for found in on_ranks(plan.ranks, numbers_of, 20, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


def test_twenty_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    assert alone(20, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(alone(20), rel=1e-8)


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[1, 2]), Plan(shard=2), Plan(channel=2)], ids=str)
def test_penalties_on_gradients_are_those_of_one_rank(plan):
    """Every second step; the points between real and made images are drawn alike."""
    wanted = alone(4, *PENALTIES)
    assert wanted[0] != pytest.approx(alone(1)[0], rel=1e-3)
    for found in on_ranks(plan.ranks, numbers_of, 4, *PENALTIES, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


OF_MY_OWN = [
    "model.options={generator: unet, generator_options: {widths: [4, 8]}, discriminator: 'discriminators:with_batch_norm'}",
    "task.options.feature_matching=0",
]


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1])], ids=str)
def test_modules_with_statistics_of_the_batch_penalties_averages_and_several_passes(plan):
    """A U-Net with BatchNorm, a discriminator of one's own with BatchNorm and dropout, 3 samples in 2 passes, on 2 ranks."""
    asked = [*OF_MY_OWN, "task.options.r1=1", "data.batch_size=3", "gradient.accumulate=2", "ema={decay: 0.9}",
             "task.options.steps=[[discriminator], [discriminator, generator]]", "optimizer.clip_norm=1"]  # fmt: skip
    wanted = alone(3, *asked)
    for found in on_ranks(plan.ranks, numbers_of, 3, *asked, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["task.options.adversarial=hing"], ValueError, r"adversarial is 'hing'; did you mean 'hinge'\? It can be: non_sat"),
        (["task.options.steps=[generator]"], ValueError, r"steps is \['generator'\]; a list of turns is wanted"),
        (["task.options.steps=[[generator], [judge]]"], ValueError, r"steps is .*; a list of turns is wanted"),
        (["task.options.r1=-1"], ValueError, r"task.options.r1 is -1; a number of 0 or more"),
        (["task.options.penalty_every=0"], ValueError, r"task.options.penalty_every is 0; a whole number"),
        (["model={name: unet}"], ValueError, r"trains generator and discriminator by turns and model.name=unet gives a"),
        (["model.options.discriminator=pach"], ValueError, r"discriminator is 'pach'; did you mean 'patch'\?"),
        (["model.options.discriminator_options={depth: 2}"], ValueError, r"discriminator_options has depth; patch takes width"),
        (["model.options.generator_options={width: 0}"], ValueError, r"model.options.width is 0; whole numbers"),
        (["guard.spike=skip"], ValueError, r"guard.spike=skip and task.name=gan trains generator and discriminator by turns"),
        (["optimizer.lr=find"], ValueError, r"optimizer.lr=find and task.name=gan trains"),
        (["model.compile=true"], ValueError, r"model.compile=True and task.name=gan trains"),
        (["data.options.pairs=false"], ValueError, r"learns images as targets and data.name=scene has one per pixel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told):
    with pytest.raises(error, match=told):
        learner_of(assemble(config(*settings), Mesh(ALONE, World(), CPU)))


def test_penalties_in_a_stream_and_features_of_scores_alone_are_refused():
    with pytest.raises(NotImplementedError, match=r"stream and task.name=gan penalizes gradients, which are differentiated"):
        alone(1, *PENALTIES, plan=Plan(stream=StreamConfig(tiles=[2, 2])))
    with pytest.raises(ValueError, match=r"feature_matching compares the discriminator's features and it gives scores alone"):
        alone(1, *OF_MY_OWN, "task.options.feature_matching=1")


def test_stages_are_refused_on_every_rank():
    told = on_ranks(2, refusal_of_stages, plan=Plan(stage=2))
    assert all("mesh.stage=2 divides one module into stages" in text for text in told)


def refusal_of_stages(mesh: Mesh) -> str:
    with pytest.raises(NotImplementedError) as caught:
        learner_of(assemble(config(), mesh))
    return str(caught.value)


@pytest.mark.parametrize("space", [[1, 1], [2, 1]], ids=str)
def test_a_step_of_turns_is_emulated_without_data(space):
    """As the planner does it: both networks, on images of zeros."""
    given = stand_in_data((3, 32, 24), classes=3, samples=4, task="restoration")
    assert emulated_step(config(f"mesh.space={space}", "data.augment=[]"), ranks=space[0], given=given).peak_bytes > 10**6
