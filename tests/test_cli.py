"""The command: help that teaches, errors in words with status 2, and nothing started before they are said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import DIGITS, run

from widefield.cli import main
from widefield.config import parse_config

VERBS = ("train", "evaluate", "predict", "export", "report")


def said(capsys, *arguments: str, status: int = 0) -> str:
    try:
        assert main(list(arguments)) == status
    except SystemExit as ended:
        assert ended.code == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_help_shows_every_verb_with_an_example(capsys):
    text = said(capsys, "--help")
    assert all(verb in text for verb in VERBS)
    assert "widefield train recipes/digits.yaml" in text
    for verb in VERBS:
        assert f"widefield {verb} " in said(capsys, verb, "--help")


def test_the_printed_config_is_whole_and_reads_back(capsys):
    text = said(capsys, "train", DIGITS, "--print-config", "optimizer.lr=0.2", "seed=3", "--run", "x", "schedule.length=5ep")
    config = parse_config(text)
    assert (config.optimizer.lr, config.seed, str(config.schedule.length)) == (0.2, 3, "5ep")
    assert "bucket_mib" in text


def test_the_schema_accepts_the_recipe_and_knows_its_keys(capsys):
    schema = json.loads(said(capsys, "train", "--schema"))
    recipe = yaml.safe_load(Path(DIGITS).read_text())
    assert set(recipe) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "name a recipe"),
        (["train", "recipes/digit.yaml"], "no recipe at recipes/digit.yaml"),
        (["train", DIGITS.replace("digits.yaml", "digit.yaml")], "did you mean 'digits.yaml'"),
        (["train", DIGITS, "optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'"),
        (["train", DIGITS, "optimizer.lr=fast"], "'optimizer.lr' is 'fast' (str)"),
        (["train", DIGITS, "optimizer"], "not an override: 'optimizer'; write KEY=VALUE"),
        (["evaluate", "nowhere"], "nowhere is no run folder"),
        (["predict", "nowhere", "a.png"], "nowhere is no run folder"),
        (["export", "nowhere"], "nowhere is no run folder"),
        (["report", "nowhere"], "nowhere is no run folder"),
        (["train", DIGITS, "mesh.shard=2", "mesh.replicate=1"], "engine/strategies/ has no fully_shard.py"),
    ],
)
def test_what_is_wrong_is_said_in_words_with_status_2(arguments, words, capsys):
    text = said(capsys, *arguments, status=2)
    assert words in text
    assert text.startswith("widefield: ") and "Traceback" not in text


def test_a_mesh_that_cannot_run_starts_no_rank(capsys):
    assert said(capsys, "train", DIGITS, "mesh.shard=2", "mesh.replicate=2", status=2).count("\n") == 1


@pytest.mark.parametrize("words", [["--rum", "x"], ["-x"]])
def test_unknown_options_are_refused(words, capsys):
    assert "not understood" in said(capsys, "train", DIGITS, *words, status=2)


def as_rank_0_of_2(monkeypatch, address: str) -> None:
    """The environment of a rank; a rank leaves by os._exit, which here only raises."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address}
    for name, value in (place | {"MASTER_PORT": "29511"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)


def test_ranks_of_a_launcher_without_a_run_folder_are_told_to_name_one(capsys, monkeypatch):
    as_rank_0_of_2(monkeypatch, "localhost")
    assert "add --run-dir DIR" in said(capsys, "train", DIGITS, status=2)


def test_a_meeting_place_that_cannot_be_resolved_is_an_error_not_a_world_of_one(capsys, monkeypatch, tmp_path):
    as_rank_0_of_2(monkeypatch, "no.such.host.invalid")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    told = said(capsys, "train", DIGITS, "--run", str(tmp_path), "mesh.replicate=2", status=2)
    assert "cannot resolve the meeting place no.such.host.invalid:29511" in told
    assert before == {number: signal.getsignal(number) for number in before}


def test_torchrun_starts_the_same_command(tmp_path):
    """Under torchrun the command sees its place and starts nothing itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "widefield"]
    arguments = ["train", DIGITS, "--run-dir", str(tmp_path / "run"), "schedule.length=1ep", "schedule.warmup=0ep"]
    ended = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "on replicate=2 (cpu)" in ended.stdout
    assert ended.stdout.count("trained to the end") == 1


def test_runs_get_fresh_numbered_folders(tmp_path):
    for _ in range(2):
        run("train", DIGITS, "schedule.length=1step", "schedule.warmup=0step", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0001", "0002"]
    assert "top-1 on 360/360 images" in run("evaluate", tmp_path / "runs" / "0002")
