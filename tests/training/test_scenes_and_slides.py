"""Do scenes and slides train under every plan to the numbers of one rank, as wholes, as patches, with and without tissue?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import losses, record
from marks import SWEEP
from ranks import on_ranks
from same_numbers import check_same_numbers, evaluation

import widefield as wf
from widefield.comm.mesh import AgreedError, World
from widefield.config import parse_config
from widefield.run import train
from widefield.training import patches

COMMON = """
optimizer: {name: sgd, lr: 0.05}
schedule: {name: constant, length: 20step}
evaluate: {every: 20step}
precision: float64
log: {tensorboard: false}
"""
FLIPS = "data.augment=[RandomHorizontalFlip, RandomVerticalFlip]"
SCENE = """
model: {name: unet, options: {widths: [4, 6]}}
data: {name: scene, batch_size: 2, workers: 0, options: {size: [45, 38], scenes: [5, 3], feature_px: 12}}
task: {name: segmentation}
"""
SLIDE = """
model: {name: resnet, options: {widths: [4, 6], blocks: 1}}
data: {name: slide, batch_size: 2, workers: 0, options: {size: [61, 54], slides: [6, 3], tumour_px: 12}}
"""
ATTENTION = ["data.tissue=otsu", "model.options.tissue=true", "model.options.pooling=attention", "model.options.attention=8"]
RANDOM = ["data.patches={size: [22, 18], per_image: 2, foreground: 0.5}", "data.batch_size=4"]
COVER = ["data.patches={size: [23, 17], draw: cover}", "data.batch_size=4"]
KINDS = {
    "scene": (SCENE, [FLIPS]),
    "slide": (SLIDE, [FLIPS]),
    "slide, attention over tissue": (SLIDE, [FLIPS, *ATTENTION]),
    "random patches": (SCENE, [FLIPS, *RANDOM]),
    "patches that cover": (SCENE, COVER),
    "patches on tissue": (SLIDE, ["data.patches={size: [24, 20], per_image: 3}", "data.tissue=otsu", "data.batch_size=4"]),
}
PLANS = {
    "copies": (2, ["mesh.replicate=2"]),
    "rows": (2, ["mesh.replicate=1", "mesh.space=[2,1]"]),
    "stream": (1, ["mesh.replicate=1", "stream.tiles=[2,2]"]),
}


def config_of(kind: str, settings: list[str]):
    text, own = KINDS[kind]
    return parse_config(text + COMMON, [*own, *settings])


def go(mesh, folder: Path, kind: str, settings: list[str]) -> str:
    return train(config_of(kind, settings), folder, mesh.world).reason


def trained(folder: Path, kind: str, ranks: int, settings: list[str]) -> Path:
    if ranks == 1:
        assert train(config_of(kind, settings), folder, World()).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, kind, settings) == ["complete"] * ranks
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of a kind on one rank, which is made when it is first asked for."""
    found: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in found:
            found[kind] = trained(tmp_path_factory.mktemp("whole") / "run", kind, 1, ["mesh.replicate=1"])
        return found[kind]

    return of


SHORT = {("scene", "rows"), ("slide, attention over tissue", "stream"), ("random patches", "copies")}
"""The others are long, and sweeps but for one plan of each kind in turn."""
PAIRS = [
    pytest.param(
        kind,
        plan,
        id=f"{kind}, {plan}",
        marks=[] if (kind, plan) in SHORT else SWEEP if (number + turn) % len(PLANS) else pytest.mark.long,
    )
    for number, kind in enumerate(KINDS)
    for turn, plan in enumerate(PLANS)
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "plan"), PAIRS)
def test_losses_of_20_steps_are_those_of_one_rank(whole, kind, plan, tmp_path):
    folder = whole(kind)
    ranks, settings = PLANS[plan]
    check_same_numbers(folder, trained(tmp_path / "run", kind, ranks, settings))
    assert KINDS[kind][0] == SLIDE or sum(losses(folder)[:5]) > sum(losses(folder)[-5:])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in dict(SHORT) else pytest.mark.long) for kind in KINDS])
def test_every_pixel_is_evaluated_once(whole, kind):
    told = evaluation(whole(kind))
    counted = sum(map(sum, told["confusion"]))
    assert told["duplicates"] == 0 and told["images"] == told["of"]
    if KINDS[kind][0] == SCENE:
        assert counted == evaluation_of_wholes()
    elif kind != "patches on tissue":
        assert counted == 3


def evaluation_of_wholes() -> int:
    """The pixels of the evaluation's scenes that count."""
    from widefield.data import open_dataset

    images = open_dataset(config_of("scene", []).data).evaluate
    return sum(int((images.read(index)[1] != 255).sum()) for index in range(len(images)))


def test_what_was_drawn_is_told_and_tissue_is_kept_with_the_run(whole):
    told = "data.patches: 2 patches of 22 x 18 px of each image and epoch, anywhere, 50 % of them on foreground"
    assert told in "\n".join(record(whole("random patches"), "start")[0]["reasons"])
    of_slides = whole("slide, attention over tissue")
    told = "by Otsu's threshold of saturation, at 1 to 1 pixels of a slide per pixel of the mask"
    assert told in "\n".join(record(of_slides, "start")[0]["reasons"])
    kept = json.loads((of_slides / "tissue.json").read_text())
    assert len(kept) == 9 and all(0 < one["share"] < 1 and one["threshold"] >= 7 for one in kept.values())


def test_an_evaluation_of_its_own_is_that_of_the_run_and_looks_for_no_foreground(whole, monkeypatch):
    monkeypatch.setattr(patches, "_foreground", lambda *arguments: pytest.fail("the images to train on are not read"))
    folder = whole("random patches")
    found = wf.evaluate(folder)
    assert found.confusion == evaluation(folder)["confusion"] and found.images == found.of


@pytest.mark.long
def test_a_cover_is_told(whole):
    told = "patches of 23 x 17 px cover 5 images, on a grid that is shifted every epoch"
    assert told in "\n".join(record(whole("patches that cover"), "start")[0]["reasons"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["patches that cover", pytest.param("random patches", marks=pytest.mark.long)])
def test_a_run_that_was_stopped_within_an_epoch_goes_on_as_if_it_had_not_been(kind, tmp_path):
    """20 steps at once, and 7 and then 13: an epoch of patches has more than 2 steps."""
    settings = ["mesh.replicate=1", "checkpoint.every=7step"]
    at_once = trained(tmp_path / "once", kind, 1, settings)
    trained(tmp_path / "parts", kind, 1, [*settings, "schedule.length=7step"])
    in_parts = trained(tmp_path / "parts", kind, 1, settings)
    check_same_numbers(at_once, in_parts)


REFUSED = [
    (SCENE, ["data.patches={size: [9]}"], "size"),
    (SCENE, ["data.patches={size: [9, 9, 9]}"], "data.patches.size=[9, 9, 9] has 3 numbers and images have 2 dims"),
    (SCENE, ["data.patches={size: [9, 9], draw: cover, per_image: 3}"], "it is of draw=random and draw is cover"),
    (SCENE, ["data.patches={size: [9, 9], classes: [4]}"], "data.patches.classes has 4 and there are 4 classes"),
    (SCENE, ["data.patches={size: [9, 9]}", "data.intensity=image"], "data.intensity=image takes the mean of whole images"),
    (SCENE, ["data.tissue=otsu"], "data.tissue of whole images is for labels of images"),
    (SCENE, ["data.tissue=otsu", "data.patches={size: [9, 9]}"], "data.tissue=otsu looks at 8-bit colours"),
    (SLIDE, ["data.patches={size: [9, 9], foreground: 0.5}"], "data.patches.foreground=0.5 is a share of patches on labelled"),
    (SLIDE, ["data.tissue=nowhere/"], "data.tissue=nowhere has no mask for the slide"),
    (SLIDE, ["model.options.tissue=true"], "model.options.tissue pools by the last channel and no channel of tissue is there"),
    (SLIDE, ["data.tissue=otsu", "data.mean=[0.5, 0.5, 0.5]"], "data.mean has 3 numbers and with data.tissue there are 4"),
    (SLIDE, ["data.tissue=otsu", "data.intensity=values"], "data.tissue adds a channel of 0 and 255 to whole slides"),
]


@pytest.mark.parametrize(("text", "settings", "told"), REFUSED)
def test_what_does_not_fit_is_refused(text, settings, told, tmp_path):
    with pytest.raises((AgreedError, ValueError)) as caught:
        train(parse_config(text + COMMON, ["mesh.replicate=1", *settings]), tmp_path / "run", World())
    assert told in str(caught.value)


def refused(mesh, folder: Path) -> str:
    config = parse_config(SLIDE + COMMON, ["mesh.replicate=2", "data.tissue=nowhere/"])
    with pytest.raises(AgreedError) as caught:
        train(config, folder, mesh.world)
    return str(caught.value)


def test_a_missing_mask_is_refused_on_every_rank(tmp_path):
    told = on_ranks(2, refused, tmp_path / "run")
    assert told[0] == told[1] and "data.tissue=nowhere has no mask for the slide slide/train/0" in told[0]
