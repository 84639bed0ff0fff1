"""Does a network that makes images of noise learn as in a loop by hand, and under every plan as on one rank?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from devices import here, on_gpu_too
from marks import LONG_ON_CPU, SWEEP, SWEEP_ON_CPU
from ranks import on_ranks
from safetensors.torch import load_file
from small_recipe import ALONE, SmallRecipe, check_evaluated_again
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import ShardingConfig, StreamConfig
from widefield.data.device import noise_of_seed
from widefield.data.order import Key
from widefield.data.transforms import seed_of
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.tasks.gan import Adversarial
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.evaluation import Evaluation
from widefield.training.running_means import register_means

CPU = torch.device("cpu")
SMALL = [
    "data.workers=0", "data.batch_size=6", "data.evaluate_batch_size=90", "precision=float64", "mesh.replicate=1", "ema=null",
    "data.read=[{Resize: {size: [16, 16]}}]", "data.read_evaluate=[{Resize: {size: [16, 16]}}]",
    "task.metrics=[{swd: {levels: 1}}]",
    "model.options.generator_options={width: 4, strides: 2}", "task.options.noise=8",
    "model.options.discriminator_options={width: 4, strides: 2, spectral: true, normalized: true}",
]  # fmt: skip
AS_MAPS = [
    "task.options.noise=[3, 4, 4]", "model.options.generator_options={width: 4, strides: 2, start: null}",
    "model.options.discriminator_options={width: 4, strides: 2, start: null}",
]  # fmt: skip
"""Noise that is a map, and scores of overlapping patches."""


def scores(found: Evaluation) -> list[float]:
    assert found.loss == found.metrics["distance"]
    return [found.metrics[name] for name in sorted(found.metrics)]


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


PATHS = ["task.options.path_length=2", "task.options.path_length_every=2", "task.options.path_length_decay=0.1"]


def penalty_of_paths(generator, noise: torch.Tensor, seeds, mean: float) -> tuple[torch.Tensor, float]:
    """StyleGAN2's, of one batch whose images are 16 x 16 px; the mean of the lengths too."""
    noise = noise.clone().requires_grad_()
    draws = [torch.Generator().manual_seed(seed_of(seed, "turn", 1, 1)) for seed in seeds]
    towards = torch.stack([torch.randn(1, 16, 16, generator=draw) for draw in draws]).double() / 16
    (gradient,) = torch.autograd.grad((generator(noise) * towards).sum(), noise, create_graph=True)
    lengths = gradient.flatten(1).norm(dim=1)
    return (lengths - mean).square().mean(), lengths.mean().item()


def by_hand(steps: int, *settings: str) -> list[float]:
    """The recipe as a plain loop with two optimizers: DCGAN's losses of logits, a mean over images each."""
    parts, mean = assemble(RECIPE.config(*settings), Mesh(ALONE, World(), CPU)), 0.0
    model, batches, prepare = parts.model, training_batches(parts, first=0, last=steps), parts.preparation(train=True)
    generator, discriminator = model.generator, model.discriminator
    adam = {"lr": parts.config.optimizer.lr, "betas": tuple(parts.config.optimizer.betas), "weight_decay": 0.0}
    of_d, of_g = (torch.optim.AdamW(module.parameters(), **adam) for module in (discriminator, generator))
    losses = []
    for step in range(steps):
        noise, real = prepare(batch := next(batches))
        with torch.no_grad():
            made = generator(noise)
        loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made)).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = F.softplus(-discriminator(generator(noise))).mean()
        if settings and step % 2 == 0:
            penalty, length = penalty_of_paths(generator, noise, batch.seeds, mean)
            loss_g, mean = loss_g + 2 * 2 * penalty, mean + 0.1 * (length - mean)
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        losses += [loss_d.item() + loss_g.item(), loss_d.item(), loss_g.item()]
    return losses


@pytest.mark.long
def test_turns_are_a_loop_by_hand():
    assert RECIPE.alone(5)[:15] == pytest.approx(by_hand(5), rel=1e-10)


@pytest.mark.long
def test_lengths_of_paths_are_a_loop_by_hand():
    assert RECIPE.alone(5, *PATHS)[:15] == pytest.approx(by_hand(5, *PATHS), rel=1e-9)


def test_a_penalty_is_due_in_each_so_many_th_step_in_which_its_network_learns():
    adversarial = Adversarial(steps=(("discriminator",), ("generator",), ("discriminator", "generator")))
    due = {name: [step for step in range(12) if adversarial.is_due(name, step, every=3)]
           for name in ("discriminator", "generator")}  # fmt: skip
    assert due == {"discriminator": [0, 5, 9], "generator": [1, 5, 10]}


# ---------------------------------------------------------------------------------------------- plans


MANY = ["data.batch_size=5", "gradient.accumulate=2", "ema={decay: 0.9}", "optimizer.clip_norm=1", "task.options.r1=2",
        "task.options.gradient_penalty=3", "task.options.penalty_every=2", "task.options.path_length=2",
        "task.options.path_length_decay=0.1",
        "task.options.steps=[[discriminator], [discriminator, generator]]"]  # fmt: skip
"""5 samples in 2 passes: ranks have 2 and 1, or 1 and 1."""


def of_both(mesh: Mesh) -> list[list[float]]:
    """Losses and scores of 20 steps, of noise that is a vector, and a map."""
    return [RECIPE.numbers(mesh, 20, *asked) for asked in ([], AS_MAPS)]


def alone(work) -> list:
    return work(Mesh(ALONE, World(), here()))


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        pytest.param(Plan(space=[2, 1]), marks=SWEEP_ON_CPU),
        pytest.param(Plan(space=[2, 2]), marks=SWEEP_ON_CPU),
        pytest.param(Plan(shard=2), marks=SWEEP_ON_CPU),  # as below, with penalties
        pytest.param(Plan(shard=2, sharding=ShardingConfig(zero=1)), marks=SWEEP_ON_CPU),
        pytest.param(Plan(channel=2), marks=SWEEP_ON_CPU),
    ],
    ids=str,
)
def test_twenty_steps_are_those_of_one_rank(plan):
    wanted = alone(of_both)
    for found in on_ranks(plan.ranks, of_both, plan=plan):
        assert found == [pytest.approx(numbers, rel=1e-8) for numbers in wanted]


@LONG_ON_CPU
@on_gpu_too
def test_twenty_steps_in_a_stream_are_those_of_one_rank():
    wanted = alone(of_both)
    assert of_both(Mesh(Plan(stream=StreamConfig(tiles=[2, 2])), World(), here())) == [
        pytest.approx(numbers, rel=1e-8) for numbers in wanted
    ]


OWN = "'discriminators:with_batch_norm'"
GREY = "{network: 'backbones:features_of_grey', size: null, mean: [0.5], std: [0.25]}"


def of_many(mesh: Mesh) -> list[float]:
    """Of a pair of one's own with BatchNorm and dropout, too, and with FID and KID by a network of one's own."""
    own = [*MANY, f"model.options={{generator: unet, generator_options: {{widths: [4, 8]}}, discriminator: {OWN}}}",
           "task.options.noise=[3, 16, 16]", f"task.metrics=[{{fid: {GREY}}}, {{kid: {GREY}}}]"]  # fmt: skip
    return RECIPE.numbers(mesh, 4, *MANY) + RECIPE.numbers(mesh, 4, *own)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        pytest.param(Plan(space=[1, 2]), marks=SWEEP),
        pytest.param(Plan(shard=2), marks=SWEEP),
        Plan(channel=2),
    ],
    ids=str,
)
def test_uneven_batches_in_passes_with_averages_and_penalties_are_those_of_one_rank(plan):
    wanted = alone(of_many)
    for found in on_ranks(plan.ranks, of_many, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.long
def test_penalties_in_a_stream_are_those_of_one_rank():
    found = of_many(Mesh(Plan(stream=StreamConfig(tiles=[2, 2])), World(), here()))
    assert found == pytest.approx(alone(of_many), rel=1e-8)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["task.options.noise=0"], ValueError, r"task.options.noise is 0; a whole number above 0 is wanted"),
        (["task.options.noise=[4, 4]"], ValueError, r"noise is \[4, 4\] and images have 2 dims; give a number"),
        (["task.options.reconstruction=1"], ValueError, r"reconstruction is 1, which compares what is made with"),
        (["task.options.feature_matching=1"], ValueError, r"task.options.feature_matching is 1, which compares"),
        (["task.options.path_length=-1"], ValueError, r"task.options.path_length is -1; a number of 0 or more is wanted"),
        (["task.options.path_length_every=0"], ValueError, r"task.options.path_length_every is 0; a whole number of 1 or"),
        (["task.options.path_length_decay=0"], ValueError, r"task.options.path_length_decay is 0; a number above 0 and up"),
        (["task.options.noise=null", "task.options.path_length=2"], ValueError, r"path_length is 2, which is of images"),
        (["task.loss=l1"], ValueError, r"task.loss is set and task.name=gan has a loss of its own"),
        (["task.class_weights=balanced"], ValueError, r"task.class_weights is balanced and the task learns images"),
        (["data.mixup=0.5"], ValueError, r"data.mixup=0.5 mixes images and task.name=gan makes images of noise like each"),
        (["data.intensity.name=zscore"], ValueError, r"has no range of pixels that is known beforehand, which what is made is"),
        (["data={name: scene, options: {size: [16, 16], scenes: [4, 2], pairs: true}}"], NotImplementedError,
         r"data.name=scene has images as targets and task.name=gan makes images of noise like the data's; take data of images"),
        (["model.options.generator_options={strides: 2, start: 0}"], ValueError, r"model.options.start is 0; whole numbers"),
        (["model.options.generator_options={depth: 2}"], ValueError, r"generator_options \{'depth': 2\} do not fit"),
        (["model.options.discriminator_options={scales: 2}"], ValueError, r"discriminator_options has scales; dcgan takes"),
        (["model={name: unet, options: {}}"], ValueError, r"trains generator and discriminator by turns and model.name=unet"),
        (["data.sampling=balanced", "task.options.noise=-1"], ValueError, r"task.options.noise is -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told):
    with pytest.raises(error, match=told):
        learner_of(assemble(RECIPE.config(*settings), Mesh(ALONE, World(), CPU)))


def test_a_generator_of_another_size_says_so():
    with pytest.raises(
        ValueError, match=r"the images are 16 x 16 pixels and the generator makes 32 x 32 of noise \[8\]; set its"
    ):
        RECIPE.alone(1, "model.options.generator_options={width: 4, strides: 3}")


@pytest.mark.long
@pytest.mark.parametrize("space", [[1, 1], [2, 1]], ids=str)
def test_a_step_is_emulated_without_data(space):
    given = stand_in_data((1, 16, 16), classes=10, samples=6)
    config = RECIPE.config(f"mesh.space={space}", "data.read=[]", "task.options.gradient_penalty=1", *PATHS)
    assert emulated_step(config, ranks=space[0], given=given).peak_bytes > 10**5


def test_a_model_that_has_something_of_a_means_name_is_refused():
    task, model = SimpleNamespace(running_means={"path_length": 0.1}), torch.nn.Module()
    model.path_length = 3
    with pytest.raises(
        ValueError, match=r"the task keeps a mean 'path_length' in the model, a Module, which has one; rename it"
    ):
        register_means(model, task, CPU)


@pytest.mark.long
def test_a_run_with_lengths_of_paths_resumes_and_is_evaluated_again(tmp_path):
    short = ["log.tensorboard=false", "schedule={name: constant, length: 4step}", "precision=float32"]
    recipe = SmallRecipe("digits_gan", [*SMALL, *PATHS, *short])
    whole = recipe.trained(tmp_path / "whole")
    check_evaluated_again(whole)
    assert load_file(whole / "weights.safetensors")["path_length"] > 0
    recipe.check_resume(whole, tmp_path / "stopped", after=3)


def refusal_of_stages(mesh: Mesh) -> str:
    with pytest.raises(NotImplementedError) as caught:
        learner_of(assemble(RECIPE.config(), mesh))
    return str(caught.value)


def test_stages_are_refused_on_every_rank():
    told = on_ranks(2, refusal_of_stages, plan=Plan(stage=2))
    assert all("mesh.stage=2 divides one module into stages" in text for text in told)
