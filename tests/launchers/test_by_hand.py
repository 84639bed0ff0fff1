"""A run started by hand, rank by rank, is the run that the command starts by itself; neither listens to the outside."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from command import DIGITS, losses, run, start, wait_for_step

from widefield.cli import main

pytestmark = pytest.mark.alone

SHORT = ("schedule.length=200step", "schedule.warmup=0step", "evaluate.every=200step", "log.tensorboard=false")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_hand(folder: Path, rank: int, *options: str) -> subprocess.Popen:
    return start(
        "train", DIGITS, *SHORT, "mesh.replicate=2", "--run", folder, "--rank", str(rank), "--world-size", "2", *options
    )


def listeners(*processes: subprocess.Popen) -> set[str]:
    """The addresses at which these processes, and all that they started, listen."""
    found = set()
    for process in processes:
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            found |= {link.laddr.ip for link in one.net_connections("inet") if link.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


def ended(process: subprocess.Popen) -> int:
    """The status of a process; what it printed is shown where a test fails."""
    output, _ = process.communicate(timeout=240)
    print(output)
    return process.returncode


@pytest.mark.long
def test_ranks_by_hand_train_as_those_of_the_command_and_none_listens_to_the_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = start("train", DIGITS, *SHORT, "mesh.replicate=2", "--run", tmp_path / "local")
    wait_for_step(whole, tmp_path / "local", 1)
    assert listeners(whole) == {"127.0.0.1"}
    assert ended(whole) == 0
    place = ("--rendezvous", f"127.0.0.1:{free_port()}", "--job", "seven")
    ranks = [by_hand(tmp_path / "hand", rank, *place) for rank in (0, 1)]
    wait_for_step(ranks[0], tmp_path / "hand", 1)
    assert listeners(*ranks) == {"127.0.0.1"}
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert losses(tmp_path / "hand") == losses(tmp_path / "local") and losses(tmp_path / "hand")


def test_two_first_ranks_by_a_file_are_refused_on_both(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDEFIELD_RENDEZVOUS_SECONDS", "120")
    ranks = [by_hand(tmp_path / "run", 0, "--rendezvous", f"file://{tmp_path}/meet") for _ in range(2)]
    for rank in ranks:
        output, _ = rank.communicate(timeout=240)
        assert rank.returncode == 2 and output.count("two processes say that they are rank 0 of 2: process ") == 1, output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "0"], "half set: it has WIDEFIELD_RANK=0 and lacks WIDEFIELD_WORLD_SIZE, WIDEFIELD_RENDEZVOUS"),
        (["--rank", "2", "--world-size", "2", "--rendezvous", "a:1"], "rank 2 of 2"),
        (["--rank", "0", "--world-size", "2", "--rendezvous", "a"], "the rendezvous 'a' is no host and port"),
    ],
)
def test_what_is_typed_wrongly_is_said_at_once(options, words, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("WIDEFIELD_")]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "RENDEZVOUS"):
        monkeypatch.setenv(f"WIDEFIELD_{name}", "")  # so that what the command sets is undone
    assert main(["train", DIGITS, "mesh.replicate=2", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_run_by_hand_prints_with_its_rank(tmp_path):
    """What one rank alone has to say begins with its rank."""
    text = run("train", DIGITS, "--rank", "1", "--world-size", "3", "--rendezvous", "no.such.host.:1", "--run", tmp_path / "x",
               "mesh.replicate=3", status=2)  # fmt: skip
    assert "widefield: rank 1: rank 1 of 3 cannot resolve the meeting place no.such.host.:1" in text
