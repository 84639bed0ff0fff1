"""Do SSD and Faster R-CNN learn under every plan as on one rank, and find the same boxes?"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectors import FASTER_RCNN, SMALL, SSD
from devices import here, on_gpu_too
from marks import LONG_ON_CPU, SWEEP_ON_CPU
from ranks import on_ranks
from small_recipe import ALONE, SmallRecipe, check_evaluated_again

from widefield.comm.mesh import Mesh, World
from widefield.config import ModelConfig, StreamConfig
from widefield.detection.region_heads import RegionHeads
from widefield.inference import _keep_part as keep_part
from widefield.inference import export, single_rank
from widefield.models import build as build_model
from widefield.plans import Plan
from widefield.prediction.answers import Asker
from widefield.tiled.api import tile, whole
from widefield.training.assemble import _check as check_parts
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.batch_sharding import window_of
from widefield.training.evaluation import Evaluation

BOTH = {"ssd": SSD, "faster_rcnn": FASTER_RCNN}


def scores(found: Evaluation) -> list[float]:
    """Those of the whole, of each class, and the losses of single images."""
    worst = [number for one in found.mistakes for number in (one.index, one.loss)]
    return [found.loss, *found.metrics.values(), *found.columns["ap"], *worst]


RECIPE = SmallRecipe("page_detection", SMALL, scores)


def all_numbers(mesh: Mesh, steps: int, *settings: str) -> dict[str, list[float]]:
    return {name: RECIPE.numbers(mesh, steps, *method, *settings) for name, method in BOTH.items()}


@cache
def on_one_rank(device: torch.device, steps: int, *settings: str) -> dict[str, list[float]]:
    return all_numbers(Mesh(ALONE, World(), device), steps, *settings)


def alone(steps: int, *settings: str) -> dict[str, list[float]]:
    return on_one_rank(here(), steps, *settings)


def assert_equal(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    for name in BOTH:
        assert found[name] == pytest.approx(wanted[name], rel=1e-8, abs=1e-12, nan_ok=True), name


# ---------------------------------------------------------------------------------------------- plans


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        Plan(space=[2, 1]),
        Plan(shard=2),
        pytest.param(Plan(space=[2, 2]), marks=SWEEP_ON_CPU),
        pytest.param(Plan(replicate=3), marks=SWEEP_ON_CPU),
        pytest.param(Plan(replicate=2, space=[1, 2]), marks=SWEEP_ON_CPU),
        pytest.param(Plan(shard=2, space=[2, 1]), marks=SWEEP_ON_CPU),
        Plan(channel=2),
        pytest.param(Plan(channel=2, space=[2, 1]), marks=SWEEP_ON_CPU),
        pytest.param(Plan(channel=2, replicate=2), marks=SWEEP_ON_CPU),
        pytest.param(Plan(channel=2, shard=2), marks=SWEEP_ON_CPU),
    ],
    ids=str,
)
def test_steps_of_the_recipe_are_those_of_one_rank(plan):
    """Pages of 77 x 91 px, some without a digit; steps of two images, so that of three copies one has none."""
    wanted = alone(20)
    for found in on_ranks(plan.ranks, all_numbers, 20, plan=plan):
        assert_equal(found, wanted)


@LONG_ON_CPU
@on_gpu_too
def test_steps_of_the_recipe_in_a_stream_are_those_of_one_rank():
    stream = Plan(stream=StreamConfig(tiles=[2, 2]))
    assert_equal(all_numbers(Mesh(stream, World(), here()), 20), alone(20))


# ---------------------------------------------------------------------------------------------- frozen parts, bad images


CASES = {
    "frozen": [["model.freeze=[backbone.body]"], ["model.freeze=[maps.backbone, roi_heads.box_head.fc6]"]],
    "accumulated": [["gradient.accumulate=2", "data.batch_size=4", "ema.decay=0.9"]] * 2,
}


def several(mesh: Mesh) -> dict[str, list[float]]:
    """Two steps of each method in each case."""
    return {
        f"{name} {method}": RECIPE.numbers(mesh, 2, *BOTH[method], *settings)
        for name, cases in CASES.items()
        for method, settings in zip(BOTH, cases, strict=True)
    }


@pytest.mark.long
@pytest.mark.parametrize("plan", [Plan(space=[2, 1]), Plan(shard=2), Plan(channel=2)], ids=str)
def test_frozen_parts_and_sums_of_passes_are_those_of_one_rank(plan):
    wanted = several(Mesh(ALONE, World(), here()))
    for found in on_ranks(plan.ranks, several, plan=plan):
        for name, numbers in wanted.items():
            assert found[name] == pytest.approx(numbers, rel=1e-8, abs=1e-12, nan_ok=True), name


BACKBONES = {
    "resnet18": "{backbone: resnet18, strides: [4, 8, 16, 32, 64], features: 16, hidden: 16, norm: frozen}",
    "timm/resnet18": "{backbone: timm/resnet18, strides: [4, 8, 16, 32, 64], features: 16, hidden: 16}",
}


def of_backbones(mesh: Mesh) -> dict[str, list[float]]:
    """A step of torchvision's and timm's backbones, with the level that is pooled of the last."""
    task = "task.options={method: faster_rcnn, features: 16, proposals: [60, 30], anchors_drawn: 32, boxes_drawn: 16}"
    return {
        name: RECIPE.numbers(mesh, 1, task, "model.name=faster_rcnn", f"model.options={options}", "data.options.pages=[2, 2]")
        for name, options in BACKBONES.items()
    }


@pytest.mark.long
@pytest.mark.sweep
def test_backbones_of_libraries_on_tiles_are_those_of_one_rank():
    wanted = of_backbones(Mesh(ALONE, World(), here()))
    for found in on_ranks(2, of_backbones, plan=Plan(space=[2, 1])):
        for name, numbers in wanted.items():
            assert found[name] == pytest.approx(numbers, rel=1e-8, abs=1e-12, nan_ok=True), name


def maps_of_vgg(mesh: Mesh) -> list[torch.Tensor]:
    """Of SSD300 as torchvision builds it, on an image of which each rank has a tile."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="ssd"), in_channels=1, num_classes=2).double()
    image = torch.randn(1, 1, 268, 285, dtype=torch.float64)
    with torch.no_grad():
        return [one for level in whole(model(tile(image, mesh))) for one in level]


@pytest.mark.long
def test_the_maps_of_ssd300_on_tiles_are_those_of_one_rank():
    """At odd sizes, where its pools leave out a row; the last map has one place."""
    wanted = maps_of_vgg(Mesh(ALONE, World(), torch.device("cpu")))
    assert [tuple(one.shape[2:]) for one in wanted[::2]] == [(34, 36), (17, 18), (9, 9), (5, 5), (3, 3), (1, 1)]
    for found in on_ranks(2, maps_of_vgg, plan=Plan(space=[2, 1]), timeout_seconds=300):
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------- what is told and refused


def reasons_of(mesh: Mesh) -> dict[str, list[str]]:
    return {name: learner_of(assemble(RECIPE.config(*method), mesh))[1] for name, method in BOTH.items()}


def test_maps_that_every_rank_has_whole_are_told_with_their_bytes():
    """Of one page of 77 x 91 px in float64: 10 x 12 and 5 x 6 places; default boxes or anchors, and 32 features."""
    places = 10 * 12 + 5 * 6
    held = {"ssd": 6 * (11 + 4), "faster_rcnn": 3 * (1 + 4) + 32}
    for found in on_ranks(2, reasons_of, plan=Plan(space=[2, 1])):
        for name, numbers in held.items():
            (told,) = [why for why in found[name] if "maps of all levels (" in why]
            assert f"({2 * places * numbers * 8 / 1024:.0f} KiB)" in told


@pytest.mark.parametrize(
    ("plan", "settings", "error", "told"),
    [
        (Plan(stage=2), [], NotImplementedError, "task.name=detection wants the maps of all levels"),
        (ALONE, ["model.compile=true"], ValueError, "model.compile=True and task.options.method=faster_rcnn has a model"),
    ],
    ids=["stage", "compile"],
)  # fmt: skip
def test_what_two_stages_cannot_is_refused_before_anything_is_sent(plan, settings, error, told):
    parts = assemble(RECIPE.config(*FASTER_RCNN, *settings), Mesh(ALONE, World(), torch.device("cpu")))
    parts = replace(parts, mesh=SimpleNamespace(plan=plan))
    with pytest.raises(error, match=told):
        check_parts(parts)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["model={name: retinanet, options: {backbone: small, strides: [8, 16]}}"],
         "the task has two stages and model.name=retinanet gives a RetinaNetMaps without a module 'maps'; take model"),
        (["task.options.features=16"], r"at 0 maps of .*\(2, 16, 10, 12\).* and the model gives 2, there .*\(2, 32, 10, 12\)"),
        (["task.options.strides=[8, 16, 24]"], "boxes are looked at on those up to 32, which are to be neighbouring powers"),
        (["task.options.proposals=[10]"], r"proposals is \[10\]; two whole numbers"),
        (["task.options.anchors_drawn=0"], "anchors_drawn 0"),
    ],
)  # fmt: skip
def test_models_and_options_that_do_not_fit_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        RECIPE.alone(1, *FASTER_RCNN, *settings)


def test_low_precision_decides_and_pools_in_float32(monkeypatch):
    """At 20,000 px a step of bfloat16 is 128 px."""
    seen, asked = [], RegionHeads.regions

    def watched(heads, output, *rest, **more):
        found = asked(heads, output, *rest, **more)
        seen.extend(one.dtype for level in output for one in level)
        seen.extend(one.dtype for answered in found.drawn for one in (answered.asked.boxes, answered.logits, answered.codes))
        return found

    monkeypatch.setattr(RegionHeads, "regions", watched)
    parts = assemble(RECIPE.config(*FASTER_RCNN, "precision=bfloat16"), Mesh(ALONE, World(), torch.device("cpu")))
    learner, _ = learner_of(parts)
    loss, _ = learner.learn([next(training_batches(parts, first=0, last=1))], stop=False)
    found = evaluate_parts(parts, learner.model)
    assert set(seen) == {torch.float32} and len(seen) > 20 and loss > 0 and found.images == 5


# ---------------------------------------------------------------------------------------------- a run


def predicted(mesh: Mesh, run: str) -> list[list[list[float]]]:
    """Boxes of a page and of a larger one by ranks that share weights or images."""
    images = [torch.arange(3 * 77 * 91).view(3, 77, 91) % 251, torch.arange(3 * 128 * 91).view(3, 128, 91) % 241]
    parts, _ = single_rank(Path(run), None)
    parts = replace(parts, mesh=mesh, window=window_of(mesh))
    keep_part(parts)
    ask = Asker(parts, top=1)
    return [ask([ask.transformed(image[:1].to(torch.uint8))], ["x"])[0].boxes for image in images]


@pytest.mark.long
def test_a_run_is_evaluated_again_and_predicts_the_same_on_ranks(tmp_path):
    run = RECIPE.trained(tmp_path / "run", *FASTER_RCNN, "schedule={length: 4step, warmup: 1step}", "mesh.space=[]",
                         "log.tensorboard=false", "task.options.score=0.002")  # fmt: skip
    check_evaluated_again(run)
    wanted = predicted(Mesh(ALONE, World(), torch.device("cpu")), str(run))
    assert all(len(boxes) > 3 for boxes in wanted)
    for plan in (Plan(space=[2, 1]), Plan(shard=2), Plan(channel=2)):
        for found in on_ranks(2, predicted, str(run), plan=plan):
            for own, boxes in zip(found, wanted, strict=True):
                torch.testing.assert_close(torch.tensor(own), torch.tensor(boxes), rtol=0, atol=1e-6)
    with pytest.raises(NotImplementedError, match="onnx would have the first of the two stages of this model, maps, alone"):
        export(run, "onnx")
