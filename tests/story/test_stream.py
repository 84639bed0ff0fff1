"""A recipe whose images are run tile after tile on one rank: the numbers, the files and the answers of whole images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import DIGITS, RECIPES, assert_same, fingerprint, forget_after, record, run
from marks import few
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield import inference
from widefield.comm.mesh import AgreedError, World
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.data.image import write_image
from widefield.run import train
from widefield.streaming.api import Streamed

STREAMED = str(RECIPES / "page_streamed.yaml")
PAGES = ["data.options.size=[70, 59]", "data.options.pages=[3, 3]", "data.batch_size=2", "data.workers=0", "precision=float64",
         "model.options.widths=[4, 6]", "optimizer.lr=0.03", "schedule.length=8step", "schedule.warmup=2step",
         "evaluate.every=2ep", "log.tensorboard=false"]  # fmt: skip
SCANS = ["precision=float64", "schedule.length=4step", "schedule.warmup=1step", "evaluate.every=1000step",
         "log.tensorboard=false", "model.options.widths=[8, 16]"]  # fmt: skip
WHOLE, TILES = ["stream=null"], ["stream.tiles=[2, 3]"]
OFTEN = ["checkpoint.every=1step", "checkpoint.keep_last=100"]


def go(mesh, folder: Path, recipe: str, settings: list[str]) -> str:
    return train(read_config(recipe, settings), folder, mesh.world).reason


def trained(folder: Path, *settings: str, ranks: int = 1, recipe: str = STREAMED, short: list[str] = PAGES) -> Path:
    """`folder` after a run on `ranks` ranks."""
    if ranks == 1:
        assert train(read_config(recipe, [*short, *settings]), folder, World()).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, recipe, [*short, *settings]) == ["complete"] * ranks
    return folder


def refused(folder: Path, *settings: str) -> str:
    """What a run says that is refused before its first step."""
    with pytest.raises(AgreedError) as caught:
        train(read_config(STREAMED, [*PAGES, *settings]), folder, World())
    assert not (folder / "record.jsonl").exists()
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Pages of 70 x 59 pixels at once, two a step and every second step one."""
    return trained(tmp_path_factory.mktemp("whole") / "run", *WHOLE, *OFTEN)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> Path:
    """The same in 2 x 3 tiles."""
    return trained(tmp_path_factory.mktemp("streamed") / "run", *TILES, *OFTEN)


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """An entry for every time that a stream is called: whether it was in training."""
    found: list[bool] = []
    forward = Streamed.forward

    def noted(self, *args, **kwargs):
        found.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Streamed, "forward", noted)
    return found


# ---------------------------------------------------------------------------------------------- the same numbers


def test_the_recipe_is_that_of_whole_pages_but_for_tiles():
    streamed, cut = (read_config(RECIPES / name).model_dump() for name in ("page_streamed.yaml", "page.yaml"))
    assert streamed["stream"]["tiles"] == [2, 2] and streamed["mesh"]["space"] == []
    assert {key for key in cut if cut[key] != streamed[key]} == {"stream", "mesh"}


@pytest.mark.long
def test_a_streamed_run_trains_and_counts_as_one_of_whole_images(streamed, whole):
    assert_same(streamed, whole)


def test_training_and_evaluation_both_run_tile_after_tile(tmp_path, calls):
    trained(tmp_path / "run", *TILES, "schedule.length=2step", "data.evaluate_batch_size=2")
    assert calls == [True, True, False, False]  # two steps; three pages, two at a time


def test_the_pages_tell_classes_apart(whole):
    """Else equal counts would say little."""
    counts = json.loads((whole / "evaluation.json").read_text())["confusion"]
    assert sum(sum(column) > 0 for column in zip(*counts, strict=True)) >= 3


def test_tiles_that_fit_a_budget_are_chosen_and_told(tmp_path, whole):
    within = trained(tmp_path / "run", "stream.tiles=null", "stream.memory=4MiB", *OFTEN)
    assert_same(within, whole)
    (told,) = [reason for reason in record(within, "start")[0]["reasons"] if " tiles of " in reason]
    rows, columns, mib = re.match(r"stream: (\d+) x (\d+) tiles of \d+ x \d+ px: ([\d.]+) MiB at most", told).groups()
    assert int(rows) * int(columns) > 1 and 1 < float(mib) <= 4.0


@pytest.mark.long
@pytest.mark.parametrize("keep", few(["host", "file"], "host", is_sweep=True))
def test_what_is_kept_may_lie_elsewhere(tmp_path, whole, keep):
    assert_same(trained(tmp_path / "run", *TILES, f"stream.keep={keep}", *OFTEN), whole)


OTHERS = ["stream.tiles=[3, 1]"]


@pytest.mark.parametrize(("before", "after"), few([(TILES, TILES), (TILES, WHOLE), (WHOLE, OTHERS)], (WHOLE, OTHERS)), ids=str)
def test_a_resumed_run_equals_one_that_was_not_stopped_also_in_other_tiles(whole, streamed, tmp_path, before, after):
    trained(tmp_path / "run", *before, *OFTEN)
    forget_after(tmp_path / "run", 3)
    trained(tmp_path / "run", *after, *OFTEN)
    assert record(tmp_path / "run", "start")[-1]["resumed_from"] == 3
    assert_same(tmp_path / "run", whole)
    if before == after:
        assert fingerprint(tmp_path / "run", ranks=1) == fingerprint(streamed, ranks=1)


def test_an_average_clipping_and_accumulation_change_nothing(tmp_path):
    settings = ["ema.decay=0.9", "gradient.accumulate=2", "optimizer.clip_norm=0.5", "schedule.length=4step"]
    one = trained(tmp_path / "whole", *WHOLE, *settings)
    assert_same(trained(tmp_path / "streamed", *TILES, *settings), one)


@pytest.mark.long
def test_a_compiled_stream_trains_as_the_whole(tmp_path):
    pytest.importorskip("torch._inductor")
    small = ["model.options.widths=[4]", "schedule.length=2step", "schedule.warmup=1step"]
    one = trained(tmp_path / "whole", *WHOLE, *small)
    assert_same(trained(tmp_path / "streamed", *TILES, "stream.compile=true", *small), one)


@pytest.mark.long
def test_a_classifier_equals_the_whole_run_with_its_dropout_and_mixing(tmp_path):
    """Masks are drawn as in the whole run; 8 x 8 scans become 4 x 4 pixels in the net."""
    settings = ["model.options.dropout=0.3", "data.mixup=0.2", "data.cutmix=1.0", "mesh.replicate=1"]
    one = trained(tmp_path / "whole", *settings, recipe=DIGITS, short=SCANS)
    assert_same(trained(tmp_path / "streamed", *settings, "stream.tiles=[2, 2]", recipe=DIGITS, short=SCANS), one)


# ---------------------------------------------------------------------------------------------- with ranks


LAYOUTS = {"rows": ["mesh.space=[2, 1]"], "copies": ["mesh.replicate=2"],
           "copies of rows": ["mesh.space=[2, 1]", "mesh.replicate=2"],
           "shared weights": ["mesh.shard=2", "mesh.replicate=1"]}  # fmt: skip


@pytest.mark.parametrize("name", few(LAYOUTS, "copies", is_sweep=True))
def test_each_rank_streams_what_it_holds(tmp_path, whole, name):
    """Of each page its half, of the batch its page; statistics are of all."""
    assert_same(trained(tmp_path / "run", *TILES, *LAYOUTS[name], *OFTEN, ranks=4 if " of " in name else 2), whole)


@pytest.mark.long
def test_copies_with_statistics_of_their_own_are_streamed(tmp_path):
    settings = ["batch_norm=averaged", "mesh.replicate=2", "schedule.length=4step"]
    copies = trained(tmp_path / "whole", *WHOLE, *settings, ranks=2)
    assert_same(trained(tmp_path / "streamed", *TILES, *settings, ranks=2), copies)


@pytest.mark.long
@pytest.mark.sweep
def test_a_wrong_number_of_tiles_is_refused_on_every_rank_in_one_message(tmp_path):
    told = run("train", STREAMED, "--run", tmp_path / "run", *PAGES, "stream.tiles=[2]", "mesh.replicate=2", status=2)
    assert told.count("stream.tiles=[2] has 1 numbers and images have 2 dims") == 1 and "Traceback" not in told
    assert not (tmp_path / "run" / "record.jsonl").exists()


# ---------------------------------------------------------------------------------------------- what is said


def test_a_streamed_run_says_how_it_is_streamed(streamed, whole):
    start = record(streamed, "start")[0]
    assert "stream:\n  tiles: [2, 3]\n" in start["plan"] and "stream: null" in record(whole, "start")[0]["plan"]
    assert [reason for reason in start["reasons"] if reason.startswith("stream: 2 x 3 tiles of ")]
    assert not [reason for reason in record(whole, "start")[0]["reasons"] if "stream" in reason]


def test_the_report_names_the_tiles(streamed, whole):
    rows = [
        re.findall(r"<tr[^>]*><td>stream</td>.*?</tr>", (folder / "report.html").read_text()) for folder in (streamed, whole)
    ]
    assert "2 x 3 tiles" in rows[0][0] and "unused" not in rows[0][0] and "unused" in rows[1][0]


@pytest.mark.long
@pytest.mark.sweep
def test_the_command_says_it_where_it_begins(tmp_path):
    told = run("train", STREAMED, "--run", tmp_path / "run", *PAGES, *TILES, "schedule.length=2step")
    assert "on one rank, streamed in 2 x 3 tiles (cpu)" in told.splitlines()[1]


# ---------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(("run_in", "again_in"), [("whole", TILES), ("streamed", WHOLE), ("streamed", [])], ids=str)
def test_a_run_is_evaluated_again_in_tiles_or_whole(whole, streamed, calls, run_in, again_in):
    folder = whole if run_in == "whole" else streamed
    told = json.loads((folder / "evaluation.json").read_text())
    one = inference.evaluate_run(folder, again_in, World())
    assert one.confusion == told["confusion"] and one.sentence == told["sentence"]
    assert bool(calls) == (again_in != WHOLE)


def test_a_streamed_run_predicts_in_tiles_and_exports_a_plain_model(streamed, whole, tmp_path, calls):
    image, _ = open_dataset(read_config(STREAMED, PAGES).data).evaluate.read(1)
    write_image(image, tmp_path / "page.png")
    of_tiles = wf.predict(streamed, [str(tmp_path / "page.png")], top=11)
    assert calls == [False]
    of_whole = wf.predict(whole, [str(tmp_path / "page.png")], top=11)
    assert len(calls) == 1 and torch.equal(of_tiles[0].pixels, of_whole[0].pixels)
    assert of_tiles[0].probabilities == of_whole[0].probabilities
    plain = inference.single_rank(streamed, None)[0].model
    assert not isinstance(plain, Streamed) and type(plain).__name__ == "UNet"


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["stream.tiles=[2]"], "stream.tiles=[2] has 1 numbers and images have 2 dims; give one number per dim, as [4, 4]"),
        (["stream.tiles=[2, 2, 2]"], "stream.tiles=[2, 2, 2] has 3 numbers and images have 2 dims"),
        (["stream.tiles=null", "stream.memory=100KiB"], "nothing fits 100 KiB in however many tiles: a step holds "),
        (["stream.tiles=null", "stream.memory=1.6MiB"], "nothing fits 1.6 MiB: the least that a step takes is "),
        (["model.compile=true"], "set model.compile=false, and stream.compile=true to compile pointwise operations"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_the_first_step(tmp_path, settings, told):
    assert told in refused(tmp_path / "run", *settings)


class Looks(nn.Module):
    """Goes another way where pixels say so, which no tile alone knows."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(in_channels, num_classes, 1)

    def forward(self, image):
        return self.layer(image) if image.mean() > 0 else self.layer(-image)


def test_a_model_that_depends_on_pixels_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "widefield.models.build", lambda config, *, in_channels, num_classes, **_: Looks(in_channels, num_classes)
    )
    assert "Looks cannot be streamed: " in refused(tmp_path / "run")


# ---------------------------------------------------------------------------------------------- what runs whole


class Extreme(nn.Module):
    """Takes the extreme of all pixels, which no sum over tiles gives."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(in_channels, num_classes, 1)

    def forward(self, image):
        x = self.layer(image)
        return x - x.amax((2, 3), keepdim=True)


def extreme(config, *, in_channels, num_classes, **_):
    return Extreme(in_channels, num_classes)


def test_what_runs_whole_stands_in_the_record_and_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr("widefield.models.build", extreme)
    folder = trained(tmp_path / "run", *TILES, "schedule.length=2step")
    start = record(folder, "start")[0]
    (one,) = start["fallbacks"]
    pixels, classes = 70 * 59, Extreme(1, 11).layer.out_channels
    assert (one["kind"], one["operation"], one["bytes"]) == ("run whole", "amax", 2 * classes * (pixels + 1) * 8)
    assert any(reason.startswith("stream: run whole: the model's amax (") for reason in start["reasons"])
    assert "run whole: 1 operation" in (folder / "report.html").read_text()


def test_a_strict_recipe_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("widefield.models.build", extreme)
    told = refused(tmp_path / "run", *TILES, "stream.strict=true")
    assert "Extreme would run 1 operation on the whole image" in told and "stream.strict=false" in told


def strictly(mesh, folder, settings):
    from unittest import mock

    with mock.patch("widefield.models.build", extreme):
        try:
            go(mesh, folder, STREAMED, settings)
        except AgreedError as error:
            return str(error)


@pytest.mark.parametrize("layout", ["mesh.space=[2, 1]", "mesh.replicate=2"])
def test_a_strict_recipe_is_refused_on_every_rank(tmp_path, layout):
    told = on_ranks(2, strictly, tmp_path / "run", [*PAGES, *TILES, layout, "stream.strict=true"])
    assert all("Extreme would run 1 operation on the whole image" in said for said in told)
    assert not (tmp_path / "run" / "record.jsonl").exists()


@pytest.mark.long
def test_a_strict_recipe_of_a_net_that_rules_cut_trains(tmp_path, whole):
    assert_same(trained(tmp_path / "run", *TILES, "stream.strict=true", *OFTEN), whole)
