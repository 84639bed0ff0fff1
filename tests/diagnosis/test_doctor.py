"""The command: what it takes, what it prints, its status; on ranks of its own, under torchrun, and from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import run

import widefield as wf
from widefield.cli import main

LOGS = Path(__file__).parent / "logs"
ROOT = Path(__file__).parents[2]


def said(capsys, *arguments: str, status: int) -> str:
    assert main(["doctor", *arguments]) == status
    told = capsys.readouterr()
    return told.out + told.err


def test_a_log_is_explained_and_the_status_says_that_something_is_wrong(capsys):
    text = said(capsys, str(LOGS / "unused_parameters.log"), status=1)
    assert "cause: parameters got no gradient, and DDP waits for them" in text and "no cure" in text
    tree = json.loads(said(capsys, str(LOGS / "unused_parameters.log"), "--json", status=1))
    assert tree["failures"][0]["name"] == "unused_parameters"
    assert "it is a warning" not in said(capsys, str(LOGS / "stride_warning.log"), status=0)


def test_several_logs_are_one_run(capsys):
    both = said(capsys, str(LOGS / "killed.log"), str(LOGS / "stride_warning.log"), status=1)
    assert both.startswith("2 files, ") and "notice: gradients are copied" in both


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.out.yaml"], "no recipe at none.out.yaml"),
        (["mesh.replicate=2"], "mesh.replicate=2 changes a recipe, and none is named; write widefield doctor RECIPE mesh"),
        ([str(LOGS / "killed.log"), "seed=3"], "after a run its folder or its logs are all that is looked at"),
        ([str(LOGS / "killed.log"), "--cluster", "8xH100"], "leave KEY=VALUE, --cluster and --ranks out"),
        (["digits", "page"], "digits page are 2 names; before a run name one recipe, after it its logs"),
        ([str(ROOT / "widefield")], "widefield has no record.jsonl and no file that is called like a log"),
        (["--ranks", "1", "--cluster", "9xfoo"], "foo"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(arguments, words, capsys):
    text = said(capsys, *arguments, status=2)
    assert words in text and "Traceback" not in text


def test_one_rank_prints_the_table(capsys, tmp_path):
    text = said(capsys, "digits", "--ranks", "1", "--run", str(tmp_path / "run"), status=0)
    assert text.startswith("widefield doctor: 1 rank on 1 host (") and "\nparity           not here" in text
    tree = json.loads(said(capsys, "--ranks", "1", "--json", "--run", str(tmp_path / "run"), status=0))
    assert tree["ok"] and len(tree["findings"]) > 20 and list(tmp_path.iterdir()) == []


def test_from_python_it_is_the_same(tmp_path):
    found = wf.doctor(LOGS / "killed.log")
    assert not found and found.failures[0].name == "killed" and "It was rank 1." in found.failures[0].cause
    checked = wf.doctor(config="digits", run=tmp_path / "run")
    assert checked and checked["recipe"].state == "ok" and checked["recipe"].figure.startswith("one rank")
    with pytest.raises(ValueError, match="leave config, cluster and run out"):
        wf.doctor(LOGS / "killed.log", cluster="8xH100")


@pytest.mark.long
@pytest.mark.alone
def test_ranks_of_its_own_are_compared(tmp_path):
    text = run("doctor", "digits", "mesh.replicate=2", "--run", tmp_path / "run", cwd=tmp_path)
    assert text.startswith("widefield doctor: 2 ranks on 1 host (") and "tensors of 3 steps under replicate=2" in text
    assert text.count("widefield doctor:") == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.alone
@pytest.mark.long
def test_under_torchrun_rank_0_prints(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "widefield"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["doctor", "page", "mesh.space=[2,1]", "--run-dir", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        [*command, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["launcher"]["figure"].startswith("2 by torchrun on ")
    assert found["parity"]["state"] == "ok" and "space=[2, 1]" in found["parity"]["figure"]
