"""A recipe, end to end, on several ranks: the same numbers, whatever happens on the way."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from command import DIGITS, fingerprint, kill_rank, losses, ranks_of, record, run, start, wait_for_step
from marks import few

pytestmark = pytest.mark.alone

KILLS = int(os.environ.get("WIDEFIELD_KILLS", "4"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The digits recipe in float64, three epochs, on 1, 2 and 3 ranks."""
    folders = {}
    for ranks in (1, 2, 3):
        folders[ranks] = tmp_path_factory.mktemp("digits") / str(ranks)
        run("train", DIGITS, "--run", folders[ranks], f"mesh.replicate={ranks}", "precision=float64", "schedule.length=3ep")
    return folders


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_change_no_loss_and_no_count(runs, ranks):
    one, several = runs[1], runs[ranks]
    assert len(losses(one)) == 69
    # float64 over 69 steps: measured 7e-16; a sample lost or repeated, or one rank's own BatchNorm, shows at 1e-2
    assert max(abs(a - b) for a, b in zip(losses(one), losses(several), strict=True)) < 1e-10
    keys = ("step", "images", "of", "duplicates", "metrics")
    assert [[line[key] for key in keys] for line in record(one, "evaluation")] == [
        [line[key] for key in keys] for line in record(several, "evaluation")
    ]


@pytest.mark.long
def test_a_last_step_with_fewer_images_than_passes_changes_nothing(tmp_path):
    """1,437 = 4 x 359 + 1: the fifth step has one image for two ranks and three passes."""
    for ranks in (1, 2):
        settings = ["precision=float64", "schedule.length=7step", "schedule.warmup=0step", "data.batch_size=359"]
        run("train", DIGITS, "--run", tmp_path / str(ranks), f"mesh.replicate={ranks}", "gradient.accumulate=3", *settings)
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-10
    assert [line["samples"] for line in record(tmp_path / "2", "step")] == [359, 359, 359, 359, 1, 359, 359]


@pytest.mark.long
def test_accumulation_and_mixing_change_no_loss_with_ranks(tmp_path):
    """Batches of 70 in 3 passes leave every share uneven, and the last batch of an epoch short."""
    settings = ["precision=float64", "schedule.length=25step", "gradient.accumulate=3", "data.batch_size=70"]
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        mixing = ["data.mixup=0.2", "data.cutmix=1.0", "schedule.warmup=5step"]
        run("train", DIGITS, "--run", folder, f"mesh.replicate={ranks}", *settings, *mixing)
    pairs = zip(losses(tmp_path / "1"), losses(tmp_path / "3"), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("ranks", few([1, 2], 2))
def test_evaluation_counts_are_equal_on_any_number_of_ranks(runs, ranks):
    sentence = run("evaluate", runs[3], f"mesh.replicate={ranks}", "data.evaluate_batch_size=37").splitlines()[-1]
    last = record(runs[1], "evaluation")[-1]
    assert sentence.startswith(f"{last['metrics']['top1']:.2f} % top-1 on 360/360 images")


@pytest.mark.long
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path):
    """SIGKILL to any rank at random steps, then the same command: same weights, optimizer, sample order and losses."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    length = max(2, KILLS // 4)  # epochs
    settings = [f"schedule.length={length}ep", "mesh.replicate=2", "checkpoint.every=7step", "model.options.dropout=0.1"]
    run("train", DIGITS, "--run", whole, *settings)
    draw = random.Random(7)
    for step in sorted(draw.sample(range(3, 23 * length - 3), KILLS)):
        process = start("train", DIGITS, "--run", cut, *settings)
        wait_for_step(process, cut, step)
        kill_rank(process, draw.randrange(2))
        assert process.returncode == 137
    run("train", DIGITS, "--run", cut, *settings)
    assert fingerprint(whole, ranks=2) == fingerprint(cut, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize(("number", "status"), few([(signal.SIGINT, 130), (signal.SIGTERM, 75)], (signal.SIGTERM, 75)))
def test_a_signal_saves_and_leaves_nothing_behind(tmp_path, number, status):
    folder, shared = tmp_path / "run", set(os.listdir("/dev/shm"))
    process = start("train", DIGITS, "--run", folder, "mesh.replicate=2", "checkpoint.every=1000step", "data.workers=1")
    wait_for_step(process, folder, 5)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks_of(process)) == 2
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "the same command goes on from there" in output and "Traceback" not in output
    stopped = record(folder, "end")[-1]
    assert stopped["reason"] == "interrupted"
    assert (folder / "checkpoints" / f"step_{stopped['step']:08}").is_dir()
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert set(os.listdir("/dev/shm")) <= shared
    again = start("train", DIGITS, "--run", folder, "mesh.replicate=2", "schedule.length=1000ep")
    wait_for_step(again, folder, stopped["step"] + 1)
    assert record(folder, "start")[-1]["resumed_from"] == stopped["step"]
    again.terminate()
    again.communicate(timeout=60)


@pytest.mark.long
def test_two_processes_do_not_train_into_one_folder(tmp_path):
    folder = tmp_path / "run"
    first = start("train", DIGITS, "--run", folder, "schedule.length=1000ep")
    wait_for_step(first, folder, 1)
    told = run("train", DIGITS, "--run", folder, status=2)
    assert f"process {first.pid} is training into {folder}" in told
    first.terminate()
    first.communicate(timeout=60)
    assert first.returncode == 75


@pytest.mark.long
def test_a_bad_image_on_one_rank_stops_all_with_one_message(tmp_path):
    from photos import photo_folder

    data = photo_folder(tmp_path / "photos", size=16)
    (data / "train" / "flower" / "2.png").write_bytes(b"")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{name: resnet}}\ndata: {{name: imagefolder, path: {data}, batch_size: 6, workers: 0}}\n")
    began = time.monotonic()
    told = run("train", recipe, "--run", tmp_path / "run", "mesh.replicate=2", "schedule.length=5ep", status=2)
    assert "flower/2.png (0 bytes" in told and "data.bad_images=skip" in told
    assert told.count("cannot read the image") <= 2  # the record's line and the error, not one per rank
    assert "Traceback" not in told
    assert time.monotonic() - began < 60
