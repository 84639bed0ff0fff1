"""A pod of several ranks ends with the status of its ranks, which torchrun hides, and leaves them the time that it has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from widefield.cli import main
from widefield.launchers._pod_shell import patience, with_status_of_ranks
from widefield.refusal import STATUSES


def ran(command: str, place: Path, **about: str) -> int:
    words = with_status_of_ranks(["sh", "-c", command])
    return subprocess.run(words, env={**os.environ, STATUSES: str(place / "statuses"), **about}, timeout=60).returncode


@pytest.mark.parametrize(
    ("statuses", "torchrun", "pod"),
    [
        ([75, 75], 1, 75),
        ([2, 2], 1, 2),
        ([1, 3], 1, 1),
        ([0, 0], 0, 0),
        ([75, 0], 0, 0),  # torchrun has started them again
        ([75, 2], 1, 75),
        ([], 1, 1),
        ([], 137, 137),
    ],
)
def test_a_pod_ends_with_what_its_ranks_say_where_torchrun_ends_with_an_error(statuses, torchrun, pod, tmp_path):
    (tmp_path / "statuses").write_text("75\n2\n")  # of a start before
    told = "".join(f'echo {status} >> "${STATUSES}"; ' for status in statuses)
    assert ran(f"{told} exit {torchrun}", tmp_path) == pod


def test_a_command_tells_its_status_where_it_is_asked_to(tmp_path, monkeypatch, capsys):
    assert main(["train", "digitz"]) == 2
    monkeypatch.setenv(STATUSES, str(tmp_path / "statuses"))
    assert main(["train", "digitz"]) == 2 and main(["list", "models"]) == 0
    assert (tmp_path / "statuses").read_text() == "2\n0\n"


@pytest.mark.alone
def test_a_pod_hands_sigterm_on_and_waits_for_the_end_of_its_ranks(tmp_path):
    """Kubernetes sends it to the first process of a container alone."""
    command = f"trap 'sleep 1; echo 75 >> \"${STATUSES}\"; exit 1' TERM; : > {tmp_path}/began; while :; do sleep 0.05; done"
    words = with_status_of_ranks(["sh", "-c", command])
    process = subprocess.Popen(words, env={**os.environ, STATUSES: str(tmp_path / "statuses")})
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


@pytest.mark.alone
def test_a_refusal_of_ranks_under_torchrun_ends_the_pod_with_2(tmp_path):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m -- widefield train digitz"
    assert ran(f"{torchrun} --run-dir {tmp_path}/run", tmp_path, OMP_NUM_THREADS="1") == 2


def test_ranks_have_most_of_the_grace_and_torchrun_some():
    assert [patience(grace) for grace in (300, 30, 1)] == [280, 15, 1]
