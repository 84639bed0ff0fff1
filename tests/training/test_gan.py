"""Does a generative network learn as in a loop by hand with two optimizers, and under every plan as on one rank?"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, SWEEP_ON_CPU
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import ShardingConfig, StreamConfig
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.evaluation import Evaluation
from widefield.training.guard import NonFiniteLossError
from widefield.training.turns import Turn

CPU = torch.device("cpu")
SMALL = [
    "data.options.size=[32, 24]", "data.options.scenes=[6, 3]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "mesh.space=[]", "task.metrics=[{swd: {levels: 1}}]",
    "model.options.generator_options={width: 4, blocks: 1, strides: 2}",
    "model.options.discriminator_options={width: 4, strides: 2, spectral: true, normalized: true}",
]  # fmt: skip
BATCH_NORM = "model.options={generator: unet, generator_options: {widths: [4, 8]}, discriminator: multiscale}"
PENALTIES = ["task.options.r1=2", "task.options.r2=1", "task.options.gradient_penalty=3", "task.options.penalty_every=2"]


def scores(found: Evaluation) -> list[float]:
    return [*(found.metrics[name] for name in ("psnr", "ssim", "swd")), found.loss]


RECIPE = SmallRecipe("scene_gan", SMALL, scores)


# ---------------------------------------------------------------------------------------------- by hand


def by_hand(steps: int) -> list[float]:
    """The recipe as a plain loop: two optimizers, hinge losses, feature matching and L1, a mean over images each."""
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
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
    assert RECIPE.alone(5)[:15] == pytest.approx(by_hand(5), rel=1e-10)


# ---------------------------------------------------------------------------------------------- plans


@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=SWEEP_ON_CPU),
        Plan(shard=2),
        pytest.param(Plan(shard=2, sharding=ShardingConfig(zero=1)), marks=SWEEP_ON_CPU),
        Plan(channel=2),
    ],
    ids=str,
)
def test_twenty_steps_of_the_recipe_are_those_of_one_rank(plan):
    wanted = RECIPE.alone(20)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 20, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


@LONG_ON_CPU
@on_gpu_too
def test_twenty_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    assert RECIPE.alone(20, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(RECIPE.alone(20), rel=1e-8)


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[1, 2]),
        Plan(shard=2),
        Plan(channel=2),
        Plan(stream=StreamConfig(tiles=[2, 2])),
        pytest.param(Plan(space=[2, 1], stream=StreamConfig(tiles=[2, 2])), marks=SWEEP_ON_CPU),
        pytest.param(Plan(replicate=2, stream=StreamConfig(tiles=[2, 2])), marks=SWEEP_ON_CPU),
    ],
    ids=str,
)
def test_penalties_on_gradients_are_those_of_one_rank(plan):
    """Every second step; the points between real and made images are drawn alike."""
    wanted = RECIPE.alone(4, *PENALTIES)
    assert wanted[0] != pytest.approx(RECIPE.alone(1)[0], rel=1e-3)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 4, *PENALTIES, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


OF_MY_OWN = [
    "model.options={generator: unet, generator_options: {widths: [4, 8]}, discriminator: 'discriminators:with_batch_norm'}",
    "task.options.feature_matching=0",
]
R1 = ["task.options.r1=2", "task.options.penalty_every=2"]
WGAN_GP = ["task.options.adversarial=wasserstein", "task.options.gradient_penalty=10"]


@pytest.mark.long
@pytest.mark.parametrize("asked", [R1, WGAN_GP], ids=["R1", "WGAN-GP"])
@pytest.mark.parametrize("plan", [Plan(stream=StreamConfig(tiles=[2, 2])), Plan(replicate=2)], ids=str)
def test_twenty_steps_with_penalties_and_batch_norm_are_those_of_one_rank(plan, asked):
    """Both networks have BatchNorm, synchronized over copies, and the discriminator has dropout."""
    settings = [*OF_MY_OWN, *asked]
    wanted = RECIPE.alone(20, *settings)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 20, *settings, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1])], ids=str)
def test_modules_with_statistics_of_the_batch_penalties_averages_and_several_passes(plan):
    """A U-Net with BatchNorm, a discriminator of one's own with BatchNorm and dropout, 3 samples in 2 passes, on 2 ranks."""
    asked = [*OF_MY_OWN, "task.options.r1=1", "data.batch_size=3", "gradient.accumulate=2", "ema={decay: 0.9}",
             "task.options.steps=[[discriminator], [discriminator, generator]]", "optimizer.clip_norm=1"]  # fmt: skip
    wanted = RECIPE.alone(3, *asked)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 3, *asked, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


def test_a_turn_holds_no_target_that_its_backward_does_not_read():
    """Of 8,192 pixels a side it has 0.75 GiB.  Without a reconstruction loss the generator's loss has none of it."""
    plan, asked = Plan(stream=StreamConfig(tiles=[2, 2])), ["task.options.reconstruction=0", "task.options.feature_matching=0"]
    parts = assemble(RECIPE.config(*asked), Mesh(plan, World(), CPU))
    learner, _ = learner_of(parts)
    prepare, targets = learner.prepare, []

    def noting(batch):
        image, target = prepare(batch)
        targets.append(StorageWeakRef(target.untyped_storage()))
        return image, target

    learner.prepare = noting
    batch = next(training_batches(parts, first=0, last=1))
    loss, count = learner._loss_of_turn(Turn("generator", (), 0, learner.scaler_of("generator")), batch)
    assert loss.requires_grad and count == 2 and targets[0].expired()


# ---------------------------------------------------------------------------------------------- losses that are not finite


def told_of(mesh: Mesh, loss: str, *settings: str) -> str:
    """What a run says in whose second step this loss is NaN."""
    learner, _ = learner_of(assemble(RECIPE.config(*settings), mesh))
    batches = training_batches(assemble(RECIPE.config(*settings), mesh), first=0, last=2)
    learner.learn([next(batches)], stop=False)
    real = type(learner.task).turn_loss

    def wrong(task, member, *rest, **named):
        return real(task, member, *rest, **named) * (float("nan") if member == loss else 1.0)

    with mock.patch.object(type(learner.task), "turn_loss", wrong), pytest.raises(NonFiniteLossError) as caught:
        learner.learn([next(batches)], stop=False)
    assert caught.value.refusal.to_tree()["member"] == loss
    return str(caught.value)


def test_a_turn_whose_loss_is_not_finite_is_named_with_what_learned_before_it():
    own = Mesh(ALONE, World(), CPU)
    told = (
        "the loss of the discriminator's turn of step 2 is nan; the optimizer did not step and the weights are those of step 1"
    )
    assert told in told_of(own, "discriminator")
    told = "loss of the generator's turn of step 2 is nan; the generator did not learn, and the discriminator had in this step"
    assert told in told_of(own, "generator")
    assert all(told in text for text in on_ranks(2, told_of, "generator", plan=Plan(replicate=2)))


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
        (["checkpoint.best=swd"], ValueError, r"checkpoint.best=swd: swd does not say whether higher is better; write \+swd"),
        (["data.options.pairs=false"], ValueError, r"learns images as targets and data.name=scene has one per pixel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told):
    with pytest.raises(error, match=told):
        learner_of(assemble(RECIPE.config(*settings), Mesh(ALONE, World(), CPU)))


def test_penalties_in_a_stream_of_so_much_memory_and_features_of_scores_alone_are_refused():
    with pytest.raises(ValueError, match=r"stream.memory=1GiB and task.name=gan penalizes gradients, .*; set stream.tiles"):
        RECIPE.alone(1, *PENALTIES, plan=Plan(stream=StreamConfig(memory="1GiB")))
    with pytest.raises(ValueError, match=r"feature_matching compares the discriminator's features and it gives scores alone"):
        RECIPE.alone(1, *OF_MY_OWN, "task.options.feature_matching=1")


def test_stages_are_refused_on_every_rank():
    told = on_ranks(2, refusal_of_stages, plan=Plan(stage=2))
    assert all("mesh.stage=2 divides one module into stages" in text for text in told)


def refusal_of_stages(mesh: Mesh) -> str:
    with pytest.raises(NotImplementedError) as caught:
        learner_of(assemble(RECIPE.config(), mesh))
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("space", [[1, 1], [2, 1]], ids=str)
def test_a_step_of_turns_is_emulated_without_data(space):
    """As the planner does it: both networks, on images of zeros."""
    given = stand_in_data((3, 32, 24), classes=3, samples=4, task="restoration")
    assert (
        emulated_step(RECIPE.config(f"mesh.space={space}", "data.augment=[]"), ranks=space[0], given=given).peak_bytes > 10**6
    )
