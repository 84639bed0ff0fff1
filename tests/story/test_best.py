"""The best weights of a run, early stopping, callbacks, and the small errors that a first run met."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from command import DIGITS, fingerprint, forget_after, record
from marks import few
from photos import photo_folder
from ranks import on_ranks

from widefield.comm.mesh import AgreedError, World
from widefield.config import read_config
from widefield.run import train
from widefield.training.checkpoint import newest_sound_in, read

SHORT = ["schedule.length=12step", "schedule.warmup=0step", "evaluate.every=2step", "checkpoint.every=1step",
         "checkpoint.keep_last=100", "checkpoint.background=false", "data.batch_size=50", "log.tensorboard=false",
         "mesh.replicate=1", "optimizer.lr=0.4"]  # fmt: skip


def go(folder: Path, *settings: str):
    return train(read_config(DIGITS, [*SHORT, *settings]), folder, World())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "run"
    assert go(folder).reason == "complete"
    return folder


def about_best(folder: Path) -> dict[str, str]:
    with safetensors.safe_open(folder / "best.safetensors", framework="pt") as file:
        return file.metadata()


@pytest.mark.long
def test_the_best_weights_are_those_of_the_best_evaluation(trained):
    evaluations = record(trained, "evaluation")
    values = [line["metrics"]["top1"] for line in evaluations]
    best = evaluations[values.index(max(values))]
    assert about_best(trained) == {
        "format": "pt", "step": str(best["step"]), "metric": "top1", "value": repr(max(values)),
    }  # fmt: skip
    assert [line["best"] for line in evaluations] == [value > max(values[:n], default=-1) for n, value in enumerate(values)]
    found = safetensors.torch.load_file(trained / "best.safetensors")
    last = safetensors.torch.load_file(trained / "weights.safetensors")
    assert found.keys() == last.keys()
    shutil.copytree(trained / "checkpoints", trained.parent / "then" / "checkpoints")
    forget_after(trained.parent / "then", best["step"])
    state, _ = read(newest_sound_in(trained.parent / "then" / "checkpoints", warn=print))
    assert all(torch.equal(found[name], state["model"][name]) for name in found)


@pytest.mark.parametrize("metric", ["loss", "-top1"])
def test_another_metric_may_choose_the_best(metric, tmp_path):
    go(tmp_path / "run", f"checkpoint.best={metric}", "schedule.length=4step")
    evaluations = record(tmp_path / "run", "evaluation")
    values = [line["loss"] if metric == "loss" else line["metrics"]["top1"] for line in evaluations]
    assert about_best(tmp_path / "run")["value"] == repr(min(values))


@pytest.mark.parametrize(
    "metric, says", [("top", "did you mean 'top"), ("nonsense", "Its evaluations have: top1, top5, loss; add it to task")]
)
def test_a_metric_that_no_evaluation_has_is_refused_before_the_first_step(metric, says, tmp_path):
    with pytest.raises(AgreedError, match=f"checkpoint.best={metric} is no metric of this run.*{says}"):
        go(tmp_path / "run", f"checkpoint.best={metric}")
    assert not record(tmp_path / "run", "step")


def test_files_of_a_run_have_the_modes_of_the_umask(trained, tmp_path):
    (tmp_path / "plain").touch()
    plain = (tmp_path / "plain").stat().st_mode
    modes = {path: path.stat().st_mode for path in trained.rglob("*") if path.is_file()}
    assert {path.name: oct(mode) for path, mode in modes.items() if mode != plain} == {}
    assert {"best.safetensors", "weights.safetensors", "tensors_0.safetensors"} <= {path.name for path in modes}


# ---------------------------------------------------------------------------------------------- early stopping


STUCK = ["evaluate.patience=2", "optimizer.lr=1e-9", "ema=null"]  # the metric does not move


@pytest.mark.long
def test_a_run_without_a_better_evaluation_ends_early_and_complete(tmp_path):
    outcome = go(tmp_path / "run", *STUCK)
    assert (outcome.reason, outcome.status, outcome.step) == ("complete", 0, 6)  # evaluations at 2, 4 and 6
    end = record(tmp_path / "run", "end")[-1]
    assert end["reason"] == "complete" and end["text"].startswith(
        "ended early at step 6 of 12: 2 evaluations in a row without a better top1: "
    )
    assert "It ended early, at step 6 of 12, for" in (tmp_path / "run/report.html").read_text()
    again = go(tmp_path / "run", *STUCK)
    assert (again.reason, again.step, again.evaluation) == ("complete", 6, None)
    assert go(tmp_path / "run", *STUCK, "evaluate.patience=3").step > 6


@pytest.mark.long
def test_patience_counts_on_where_a_run_stopped(tmp_path):
    go(tmp_path / "whole", *STUCK)
    go(tmp_path / "cut", *STUCK)
    forget_after(tmp_path / "cut", 5)  # one evaluation without improvement is behind it
    assert go(tmp_path / "cut", *STUCK).step == 6
    assert fingerprint(tmp_path / "cut", ranks=1) == fingerprint(tmp_path / "whole", ranks=1)
    assert about_best(tmp_path / "cut") == about_best(tmp_path / "whole")


def sharded(mesh, folder: Path, settings: list[str]) -> tuple:
    outcome = train(read_config(DIGITS, settings), folder, mesh.world)
    return outcome.reason, outcome.step


COPIES, PARTS = ["mesh.replicate=2"], ["mesh.replicate=1", "mesh.shard=2", "sharding.zero=3"]


@pytest.mark.long
@pytest.mark.parametrize("plan", few([COPIES, PARTS], COPIES, is_sweep=True))
def test_ranks_end_early_together_and_one_of_them_writes_the_best(plan, tmp_path):
    settings = [*SHORT, *STUCK, *plan, "ema.decay=0.5", "precision=float64"]
    assert on_ranks(2, sharded, tmp_path / "run", settings) == [("complete", 6)] * 2
    go(tmp_path / "alone", *STUCK, "ema.decay=0.5", "precision=float64")
    mine, alone = (safetensors.torch.load_file(tmp_path / name / "best.safetensors") for name in ("run", "alone"))
    assert mine.keys() == alone.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-10)  # float64, two steps


# ---------------------------------------------------------------------------------------------- small errors


def photos(place: Path, *, classes: int) -> list[str]:
    data = photo_folder(place / "photos", size=16)
    for split in ("train", "val") if classes == 1 else ():
        for file in (data / split / "flower").iterdir():
            file.unlink()
        (data / split / "flower").rmdir()
    return ["data.name=imagefolder", f"data.path={data}", "data.workers=0", "data.read=[]", "data.augment=[]"]


def test_one_class_is_refused_in_words_before_a_step(tmp_path):
    with pytest.raises(AgreedError, match="has one class only, 'china', which every answer would be; .* give it two or more"):
        go(tmp_path / "run", *photos(tmp_path, classes=1))


def test_what_is_printed_counts_in_good_english(tmp_path, capsys):
    settings = photos(tmp_path, classes=2)
    go(tmp_path / "run", *settings, "data.batch_size=1", "schedule.length=1step", "evaluate.every=1step")
    said = capsys.readouterr().out
    assert "2 classes; 1 step of 1 image, 24 an epoch" in said and "duplicate" not in said
    assert re.search(r"step 1  ep 0.04  \d+.\d\d % top-1 on 12/12 images  loss ", said)


def test_a_single_evaluation_is_a_point_with_its_value(tmp_path):
    go(tmp_path / "run", "schedule.length=1step", "evaluate.every=1step")
    page = (tmp_path / "run/report.html").read_text()
    svg = page[page.index('aria-label="metrics and loss of evaluations by epoch"') :]
    svg = svg[: svg.index("</svg>")]
    (line,) = record(tmp_path / "run", "evaluation")
    for value in (line["loss"], *list(line["metrics"].values())):
        assert f">{value:.4g}<" in svg


def test_the_report_marks_the_best_epoch(trained):
    best = int(about_best(trained)["step"])
    page = (trained / "report.html").read_text()
    assert f"(step {best})" in page and f"{best} (best)" in page


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_run_folder_that_cannot_be_one_is_refused_in_words(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file.*; name another one with --run|file.*folder with --run"):
        go(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_data_in_memory_is_not_said_to_be_free(trained):
    reasons = record(trained, "start")[0]["reasons"]
    assert not any("nothing to wait for" in reason for reason in reasons)
    assert "data.workers=0: digits is in memory, so reading is a copy; set it if transforms take long" in reasons
