"""A recipe whose images lie in tiles over several ranks: the numbers, the files and the answers of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import DIGITS, RECIPES, assert_same, fingerprint, forget_after, record, run
from marks import few
from ranks import on_ranks

from widefield import inference
from widefield.comm.mesh import AgreedError, World
from widefield.config import read_config
from widefield.run import train

PAGE = str(RECIPES / "page.yaml")
PAGES = ["data.options.size=[96, 80]", "data.options.pages=[3, 3]", "data.batch_size=2", "data.workers=0", "precision=float64",
         "model.options.widths=[4, 6, 8]", "optimizer.lr=0.03", "schedule.length=12step", "schedule.warmup=2step",
         "evaluate.every=2ep", "log.tensorboard=false"]  # fmt: skip
SCANS = ["precision=float64", "schedule.length=4step", "schedule.warmup=1step", "evaluate.every=1000step",
         "log.tensorboard=false"]  # fmt: skip
LAYOUTS = {"rows": ["mesh.space=[2,1]"], "rows and columns": ["mesh.space=[2,2]"],
           "copies of rows": ["mesh.space=[2,1]", "mesh.replicate=2"]}  # fmt: skip


def go(mesh, folder: Path, recipe: str, settings: list[str]) -> str:
    return train(read_config(recipe, settings), folder, mesh.world).reason


def again(mesh, folder: Path, settings: list[str]):
    return inference.evaluate_run(folder, settings, mesh.world)


def trained(folder: Path, *settings: str, ranks: int = 1, recipe: str = PAGE, short: list[str] = PAGES, **options) -> Path:
    """`folder` after a run on `ranks` ranks; on one, images lie whole."""
    if ranks == 1:
        assert train(read_config(recipe, ["mesh.space=[]", *short, *settings]), folder, World()).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, recipe, [*short, *settings], **options) == ["complete"] * ranks
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Pages of 96 x 80 pixels, two a step and every second step one, on one rank."""
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """The same with each page on two ranks."""
    return trained(tmp_path_factory.mktemp("cut") / "run", *LAYOUTS["rows"], "checkpoint.every=1step",
                   "checkpoint.keep_last=100", ranks=2)  # fmt: skip


@pytest.mark.long
def test_the_pages_tell_classes_apart(whole):
    """Else equal counts would say little."""
    counts = json.loads((whole / "evaluation.json").read_text())["confusion"]
    assert sum(sum(column) > 0 for column in zip(*counts, strict=True)) >= 3


@pytest.mark.parametrize("name", few(LAYOUTS, "rows", then=["rows and columns"], is_sweep=True))
def test_tiles_train_and_count_as_one_rank(whole, tmp_path, name):
    assert_same(trained(tmp_path / "run", *LAYOUTS[name], ranks=2 if name == "rows" else 4), whole)


@pytest.mark.long
def test_a_run_on_tiles_says_how_images_are_cut(cut):
    reasons = record(cut, "start")[0]["reasons"]
    assert "images of 96 x 80 px are cut at row 48: tiles of 48 x 80 px" in reasons
    assert any(reason.startswith("tiles in space: 2 ranks share each image, 2 x 1") for reason in reasons)


# ---------------------------------------------------------------------------------------------- resumed


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    few(
        [("rows", "rows"), ("rows", "one rank"), ("one rank", "rows")],
        ("rows", "one rank"),
        then=[("rows", "rows")],
        is_sweep=True,
    ),
)
def test_a_resumed_run_equals_one_that_was_not_stopped_also_under_another_plan(whole, cut, tmp_path, before, after):
    folder = tmp_path / "run"
    ranks = {"one rank": 1, "rows": 2}
    often = ["checkpoint.every=1step", "checkpoint.keep_last=100"]
    trained(folder, *often, *LAYOUTS.get(before, []), ranks=ranks[before])
    forget_after(folder, 5)
    trained(folder, *often, *LAYOUTS.get(after, []), ranks=ranks[after])
    assert record(folder, "start")[-1]["resumed_from"] == 5
    assert_same(folder, whole)
    if before == after:
        assert fingerprint(folder, ranks=2) == fingerprint(cut, ranks=2)


# ---------------------------------------------------------------------------------------------- settings


ALTOGETHER = ["ema.decay=0.9", "gradient.accumulate=2", "optimizer.clip_norm=0.5"]


@pytest.mark.long
@pytest.mark.sweep
def test_an_average_clipping_and_accumulation_change_nothing(tmp_path):
    one = trained(tmp_path / "one", *ALTOGETHER)
    assert_same(trained(tmp_path / "cut", *ALTOGETHER, *LAYOUTS["rows"], ranks=2), one)


@pytest.mark.sweep
@pytest.mark.long
def test_a_compiled_model_trains_on_tiles_as_one_that_is_not(tmp_path):
    pytest.importorskip("torch._inductor")
    of_two_sizes = ["data.options.pages=[5, 5]", "data.batch_size=3"]  # three pages and two
    small = [*ALTOGETHER, *of_two_sizes, "model.options.widths=[4]", "schedule.length=2step", "schedule.warmup=1step"]
    one = trained(tmp_path / "one", *small)
    compiled = ["model.compile=true", *LAYOUTS["rows"]]
    assert_same(trained(tmp_path / "cut", *small, *compiled, ranks=2, timeout_seconds=400), one)


@pytest.mark.long
@pytest.mark.parametrize("batch_norm", few(["averaged", "broadcast"], "averaged", is_sweep=True))
def test_other_batch_norms_are_of_copies_and_never_of_tiles(tmp_path, batch_norm):
    """The tiles of one image have one statistic, whatever a recipe asks for; what copies do is up to the recipe."""
    settings = [f"batch_norm={batch_norm}", "mesh.replicate=2", "schedule.length=4step"]
    whole_images = trained(tmp_path / "whole", "mesh.space=[]", *settings, ranks=2)
    assert_same(trained(tmp_path / "cut", *LAYOUTS["rows"], *settings, ranks=4), whole_images)


@pytest.mark.long
def test_a_classifier_on_tiles_equals_one_rank_with_its_dropout_and_mixing(tmp_path):
    settings = ["model.options.dropout=0.3", "data.mixup=0.2", "data.cutmix=1.0"]
    one = trained(tmp_path / "one", *settings, recipe=DIGITS, short=SCANS)
    layout = [*LAYOUTS["rows"], "mesh.replicate=1"]
    two = trained(tmp_path / "two", *settings, *layout, ranks=2, recipe=DIGITS, short=SCANS)
    assert_same(two, one)
    assert not [reason for reason in record(two, "start")[0]["reasons"] if reason.startswith("dropout")]


# ---------------------------------------------------------------------------------------------- answers and refusals


def test_a_run_of_one_rank_is_evaluated_on_tiles(whole, tmp_path):
    told = json.loads((whole / "evaluation.json").read_text())
    for one in on_ranks(4, again, whole, LAYOUTS["rows and columns"]):
        assert one.confusion == told["confusion"] and one.sentence == told["sentence"]


@pytest.mark.long
def test_the_command_evaluates_on_tiles(whole):
    told = json.loads((whole / "evaluation.json").read_text())
    assert run("evaluate", whole, "mesh.space=[2,1]").splitlines()[-1].startswith(told["sentence"])


def refused(mesh, folder: Path, settings: list[str]) -> str:
    with pytest.raises(AgreedError) as caught:
        train(read_config(PAGE, settings), folder, mesh.world)
    return str(caught.value)


def test_a_size_too_many_is_refused_before_the_first_step(tmp_path):
    for told in on_ranks(2, refused, tmp_path / "run", [*PAGES, "mesh.space=[2,1,1]"]):
        assert "mesh.space=[2, 1, 1] has 3 sizes and images have 2 dims; give one size per dim, as [2, 1]" in told
    assert not (tmp_path / "run" / "record.jsonl").exists()


@pytest.mark.long
@pytest.mark.sweep
def test_a_missing_size_is_refused_on_every_rank_in_one_message(tmp_path):
    told = run("train", PAGE, "--run", tmp_path / "run", *PAGES, "mesh.space=[2]", status=2)
    assert "mesh.space=[2] has 1 sizes and images have 2 dims; give one size per dim, as [2, 1]" in told
    assert told.count("mesh.space=[2] has") == 1 and "Traceback" not in told


@pytest.mark.long
def test_tiles_without_a_pixel_change_nothing(tmp_path):
    """8 x 8 scans become 2 x 2 and then 1 pixel deep in the net: the fourth tile has none."""
    one = trained(tmp_path / "one", recipe=DIGITS, short=SCANS)
    layout = ["mesh.space=[4,1]", "mesh.replicate=1"]
    assert_same(trained(tmp_path / "cut", *layout, ranks=4, recipe=DIGITS, short=SCANS), one)
