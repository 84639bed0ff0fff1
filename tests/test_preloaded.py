"""A command that a test forks is the command that a user starts, but for the loading."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import preloaded
import pytest
from command import DIGITS, fingerprint, record, run, start, wait_for_step
from preloaded import AT_START, PreloadedCommand, may_be_forked

from widefield.cores import usable_cores

pytestmark = pytest.mark.skipif(not may_be_forked(AT_START), reason="commands are not forked here")

MINE = """
import os
import torch
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        tell("forward")
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: tell("backward"))
        return output


def tell(where):
    print(f"rank {os.environ['RANK']}, {where}, threads: {torch.get_num_threads()}", flush=True)


def net(num_classes):
    return Net(nn.Flatten(), nn.Linear(64, num_classes))
"""
"""A net whose ranks tell how many threads they have."""
SHORT = ("schedule.length=4step", "schedule.warmup=0ep", "data.batch_size=8", "mesh.replicate=2")


@pytest.mark.long
def test_it_trains_to_the_same_bytes_and_says_the_same(tmp_path):
    words = ("train", DIGITS, *SHORT, "--run", "run")
    for name in ("forked", "anew"):
        (tmp_path / name).mkdir()
    forked = run(*words, cwd=tmp_path / "forked")
    anew = run(*words, cwd=tmp_path / "anew", anew=True)
    assert fingerprint(tmp_path / "forked/run", ranks=2) == fingerprint(tmp_path / "anew/run", ranks=2)
    assert sentences(forked) == sentences(anew) != []


def sentences(output: str) -> list[str]:
    """Without the lines of progress, which come as time passes and have speeds."""
    return [line for line in output.splitlines() if "img/s" not in line]


@pytest.mark.long
def test_its_status_and_output_are_its_own(tmp_path):
    process = start("train", DIGITS, "optimizer.name=sdg", cwd=tmp_path)
    assert isinstance(process, PreloadedCommand) and process.pid not in (os.getpid(), os.getppid())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.0)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == process.poll() == 2 and "did you mean 'sgd'?" in output
    again = run("train", DIGITS, "optimizer.name=sdg", cwd=tmp_path, status=2, anew=True)
    assert again == output


def test_it_hears_signals(tmp_path):
    words = ("train", "digits", "schedule.length=1000ep", "--run", tmp_path / "run")
    process = start(*words)
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in output, output
    killed = start(*words)
    wait_for_step(killed, tmp_path / "run", record(tmp_path / "run", "end")[-1]["step"] + 1)
    killed.kill()
    assert "resumed from" in killed.communicate(timeout=30)[0]
    assert killed.returncode == -signal.SIGKILL


def test_what_is_read_while_loading_starts_it_anew(tmp_path):
    assert may_be_forked({**AT_START, "WIDEFIELD_FAULTS": "x", "PYTHONPATH": str(tmp_path)})
    for name in ("OMP_NUM_THREADS", "RANK", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES"):
        assert not may_be_forked({**AT_START, name: "7"})
    process = start("--version", env={**os.environ, "OMP_NUM_THREADS": "7"})
    assert isinstance(process, subprocess.Popen)
    assert "widefield" in process.communicate(timeout=60)[0]


@pytest.mark.long
def test_ranks_have_the_threads_that_the_launcher_chooses(tmp_path, monkeypatch):
    """And not those of the process that they are forked from, which has loaded torch where nothing said how many."""
    unset = {name: value for name, value in AT_START.items() if name != "OMP_NUM_THREADS"}
    monkeypatch.setattr(preloaded, "AT_START", unset)
    preloaded._server.cache_clear()
    (tmp_path / "mine.py").write_text(MINE)
    unset["PYTHONPATH"] = os.pathsep.join([str(tmp_path), unset.get("PYTHONPATH", "")])
    words = ("train", DIGITS, *SHORT, "model.name=mine:net", "model.options={}")
    try:
        assert may_be_forked(unset)
        forked = run(*words, "--run", "forked", cwd=tmp_path, env=unset)
    finally:
        preloaded._server.cache_clear()
    anew = run(*words, "--run", "anew", cwd=tmp_path, env=unset, anew=True)
    told = set(re.findall(r"rank \d, \w+, threads: \d+", anew))
    assert told == set(re.findall(r"rank \d, \w+, threads: \d+", forked))
    threads = max(1, usable_cores() // 2)
    assert told == {f"rank {rank}, {where}, threads: {threads}" for rank in (0, 1) for where in ("forward", "backward")}
    assert fingerprint(tmp_path / "forked", ranks=2) == fingerprint(tmp_path / "anew", ranks=2)
