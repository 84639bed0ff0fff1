"""Does restoration learn under every plan as on one rank, at any scale, and are PSNR and SSIM those of torchmetrics?"""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe
from torch.nn import functional as F
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

from widefield.comm.mesh import Mesh, World
from widefield.config import StreamConfig, parse_config
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.plans import Plan
from widefield.training.assemble import assemble, evaluate_parts, training_batches
from widefield.training.evaluation import Evaluation

CPU = torch.device("cpu")
SMALL = [
    "data.options.size=[48, 36]", "data.options.pages=[6, 5]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "model.options={width: 4, blocks: 1}",
]  # fmt: skip
TWICE = ["data.options.scale=2", "task.options.scale=2", "model.options={width: 4, blocks: 1, scale: 2}"]
MOVED = "data.augment=[{RandomCrop: {size: [18, 12]}}, RandomHorizontalFlip, {RandomRotation: {degrees: 30}}]"
CUT = "data.augment=[{RandomCrop: {size: [17, 17]}}, RandomRotate90, RandomVerticalFlip, {GaussianNoise: {sigma: 0.1}}]"


def scores(found: Evaluation) -> list[float]:
    return [*(found.metrics[name] for name in ("psnr", "psnr_all", "ssim")), found.loss]


RECIPE = SmallRecipe("page_restoration", SMALL, scores)


# ---------------------------------------------------------------------------------------------- plans


@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        pytest.param(Plan(space=[2, 2]), marks=pytest.mark.long),
        Plan(shard=2),
    ],
    ids=str,
)
def test_twenty_steps_of_the_recipe_are_those_of_one_rank(plan):
    wanted = RECIPE.alone(20)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 20, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


@on_gpu_too
def test_twenty_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    assert RECIPE.alone(20, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(RECIPE.alone(20), rel=1e-8)


@on_gpu_too
@pytest.mark.parametrize("settings", [[], [MOVED], [CUT]], ids=["whole", "moved", "cut"])
def test_tiles_of_twice_the_pixels_learn_as_one_rank(settings):
    """Rows are cut at odd places of the targets' grid where 17 rows are 9 and 8."""
    wanted = RECIPE.alone(3, *TWICE, *settings)
    for found in on_ranks(2, RECIPE.numbers, 3, *TWICE, *settings, plan=Plan(space=[2, 1])):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_stream_of_twice_the_pixels_learns_as_one_rank():
    assert RECIPE.alone(2, *TWICE, plan=Plan(stream=StreamConfig(tiles=[2, 2]))) == pytest.approx(
        RECIPE.alone(2, *TWICE), rel=1e-9
    )


def test_patches_of_pairs_are_learned():
    """Patches are windows of input and target, of which each is its own place."""
    assert len(set(RECIPE.alone(2, *TWICE, "data.patches={size: [16, 12], evaluate: whole}", "data.augment=[]"))) == 6


# ---------------------------------------------------------------------------------------------- metrics


def test_psnr_and_ssim_are_torchmetrics_over_all_images():
    parts = assemble(RECIPE.config(), Mesh(ALONE, World(), CPU))
    found = evaluate_parts(parts, parts.model).metrics
    pages = [parts.dataset.evaluate.read(index) for index in range(5)]
    image, target = (torch.stack([pair[number] for pair in pages]).double() / 255 for number in (0, 1))
    with torch.no_grad():
        output = parts.model((image - 0.298) / 0.14)
    each = PeakSignalNoiseRatio(data_range=1.0, reduction="elementwise_mean", dim=(1, 2, 3))
    for metric, name in (
        (each, "psnr"),
        (PeakSignalNoiseRatio(data_range=1.0), "psnr_all"),
        (StructuralSimilarityIndexMeasure(data_range=1.0), "ssim"),
    ):
        metric.set_dtype(torch.float64)
        metric.update(output, target)
        assert found[name] == pytest.approx(float(metric.compute()), rel=1e-6), name  # torchmetrics adds PSNRs in float32


# ---------------------------------------------------------------------------------------------- pairs


def batch_of(*settings: str):
    parts = assemble(RECIPE.config("data.options.noise=0", *settings), Mesh(ALONE, World(), CPU))
    return next(training_batches(parts, first=0, last=1))


@pytest.mark.parametrize("moves", ["RandomHorizontalFlip: {p: 1.0}", "RandomVerticalFlip: {p: 1.0}", "RandomRotate90: {}",
                                   "RandomCrop: {size: [9, 7]}", "CenterCrop: {size: [13, 11]}"])  # fmt: skip
def test_a_pair_is_moved_together(moves):
    """Without noise the input is the mean of 2 x 2 pixels of the target, wherever both were moved; rounding is up to 1/2."""
    batch = batch_of(*TWICE, f"data.augment=[{{{moves}}}]")
    small = F.avg_pool2d(batch.target.double(), 2)
    assert small.shape == batch.image.shape and (small - batch.image).abs().max() <= 0.5


def test_a_rotated_pair_stays_a_pair():
    """Bilinear pixels of both grids differ where the page is fine; a shift by half a pixel of the target would be seen."""
    batch = batch_of("data.augment=[{RandomRotation: {degrees: [20, 20]}}]")
    assert torch.equal(batch.image, batch.target)
    twice = batch_of(*TWICE, "data.augment=[{RandomAffine: {degrees: 0, translate: [0.2, 0.2]}}, RandomCrop: {size: [12, 10]}]")
    apart = (F.avg_pool2d(twice.target.double(), 2) - twice.image)[..., 1:-1, 1:-1].abs()
    assert apart.mean() < 3, apart.mean()


def test_colours_change_the_input_alone():
    clean, dark = batch_of("data.augment=[]"), batch_of("data.augment=[{ColorJitter: {brightness: [0.5, 0.5]}}]")
    assert torch.equal(clean.target, dark.target) and not torch.equal(clean.image, dark.image)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["task.options.scale=2"], ValueError, r"task.options.scale is 2 and the targets of data.name=page have 1 times"),
        (["task.options.scale=0"], ValueError, r"task.options.scale is 0; a whole number of 1 or more is wanted"),
        (["data.intensity=zscore"], ValueError, r"data.intensity=zscore has no range of pixels that is known beforehand"),
        (["task.name=segmentation", "task.loss=null", "task.loss_options={}"], ValueError,
         r"learns one per pixel and data.name=page has images as targets; set task.name=restoration"),
        (["data.options.pairs=false"], ValueError, r"learns images as targets and data.name=page has one per pixel"),
        (["data.mixup=0.2"], ValueError, r"data.mixup=0.2 mixes images"),
        (["task.class_weights=[1]"], ValueError, r"the task learns images, which have no classes"),
        (["data.patches={size: [16, 16], foreground: 0.5}"], ValueError, r"data.patches.foreground=0.5 is a share of patches"),
        (["data.augment=[{ClassBalancedCrop: {size: [8, 8]}}]"], NotImplementedError, r"here targets are images; use Random"),
        ([*TWICE, "data.augment=[ElasticTransform]"], NotImplementedError, r"ElasticTransform, whose displacements are drawn"),
        (["data.options.noise=2"], ValueError, r"data.options.noise is 2; a share of the range from 0 to 1"),
        (["data.options.scale=5"], ValueError, r"take multiples of scale=5"),
        (["data.options.scale=0"], ValueError, r"data.options.scale is 0; a whole number"),
        (["task.loss_options.terms={}"], ValueError, r"terms is \{\}; losses with their weights are wanted"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told):
    with pytest.raises(error, match=told):
        assemble(RECIPE.config(*settings), Mesh(ALONE, World(), CPU))


def test_a_model_of_another_size_and_images_smaller_than_the_window_are_refused():
    with pytest.raises(ValueError, match=r"the targets are 48 x 36 pixels and the model gives 96 x 72; take a model that"):
        RECIPE.alone(1, "model.options={width: 4, blocks: 1, scale: 2}")
    with pytest.raises(ValueError, match=r"the images are 5 x 36 px and SSIM's window of 11 px wants 6 px or more"):
        RECIPE.alone(1, "data.options.size=[5, 36]")
    with pytest.raises(ValueError, match=r"SSIM's window of 11 px wants 176 px or more along each dim at 5 scales"):
        RECIPE.alone(1, "task.loss=ms_ssim", "task.loss_options={}")


def test_a_float_recipe_has_a_default_loss():
    short = parse_config("data: {name: page, options: {pairs: true}}\nmodel: {name: restorer}\ntask: {name: restoration}", [])
    assert assemble(short, Mesh(ALONE, World(), CPU)).task.sentence({"psnr": 20.0, "ssim": 0.5}) == "PSNR 20.00 dB, SSIM 0.5000"


@pytest.mark.parametrize("space", [[1, 1], [2, 1]], ids=str)
def test_a_step_of_pairs_is_emulated_without_data(space):
    """As the planner does it: an image of zeros with a target of twice the pixels."""
    given = stand_in_data((1, 24, 18), classes=1, samples=4, task="restoration", scale=2)
    small = RECIPE.config(*TWICE, f"mesh.space={space}", "data.augment=[]")
    assert emulated_step(small, ranks=space[0], given=given).peak_bytes > 0
