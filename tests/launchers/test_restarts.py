"""After a failure the launcher starts the ranks again, so often as it may, and not where the same would come again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from widefield.cli import main
from widefield.cli.train import CASES
from widefield.config import RunConfig, read_config
from widefield.launchers import torchrun
from widefield.launchers._restarting import Again, Failure, Restarts, may_change_ranks, restart_in_words
from widefield.plans import check, plan_of, refit

KILLED = "rank 1 was killed by SIGKILL"


def restarts(most: int, failures: list[Failure], *, least: int = 2) -> Restarts:
    return Restarts(
        most, failure_since=lambda since: failures.pop(0), starts=lambda n: Again(n, ["train"]) if n >= least else None
    )


def test_a_run_starts_again_as_often_as_it_may():
    asked = restarts(2, [Failure(step=5), Failure(step=9, stepped=True), Failure(step=13, stepped=True)])
    assert asked.environment["TORCHELASTIC_RESTART_COUNT"] == "0" and restart_in_words(asked.environment) is None
    for count in (1, 2):
        assert asked.after(137, KILLED, ranks=2, since=0.0) == Again(2, ["train"])
        assert asked.told == f"restart {count} of 2, on 2 ranks, from the newest sound checkpoint"
        assert restart_in_words(asked.environment) == f"restart {count} of 2 on 2 ranks, since {KILLED}"
        assert may_change_ranks(asked.environment, has_begun=True)
    assert asked.after(137, KILLED, ranks=2, since=0.0) is None
    assert asked.told == "the run was restarted 2 times, as --max-restarts allows"


def test_single_ranks_that_start_again_count_as_restarts():
    asked = restarts(3, [Failure(step=5), Failure(step=9, stepped=True)])
    assert "WIDEFIELD_MAY_COME_BACK" not in asked.environment
    assert asked.one(KILLED)
    assert asked.told == f"{KILLED}; it is started again (1 of 3 restarts), and the others go on"
    assert asked.after(137, KILLED, ranks=2, since=0.0) is not None
    assert asked.one(KILLED) and not asked.one(KILLED)
    assert asked.after(137, KILLED, ranks=2, since=0.0) is None


def test_the_same_words_at_the_same_step_twice_in_a_row_end_the_run():
    same = Failure(step=5, stepped=True, words="the loss of step 6 is nan")
    other = Failure(step=5, stepped=True, words="rank 1 lost another rank")
    asked = restarts(9, [same, other, same, same])
    found = [asked.after(2, "rank 0 ended with exit code 2", ranks=2, since=0.0) for _ in range(4)]
    assert [again is not None for again in found] == [True, True, True, False]
    assert asked.told == "the run failed twice in a row at step 5 in the same words, so it is not restarted"


def test_where_fewer_ranks_are_allowed_the_same_failure_goes_on_with_fewer():
    asked = restarts(9, [Failure()] * 3, least=1)
    assert [asked.after(137, KILLED, ranks=n, since=0.0) for n in (3, 3, 2)] == [
        Again(3, ["train"]), Again(2, ["train"]), Again(1, ["train"]),
    ]  # fmt: skip


def test_an_error_of_the_users_is_not_tried_again_before_a_step():
    asked = restarts(9, [Failure(step=5, words="a"), Failure(step=5, stepped=True, words="b")])
    assert asked.after(2, "rank 0 ended with exit code 2", ranks=2, since=0.0) is None
    assert asked.told == "the same error would come again, so the run is not restarted"
    assert asked.after(2, "rank 0 ended with exit code 2", ranks=2, since=0.0) is not None  # as an image that is not read


def test_devices_that_are_lost_end_a_run_that_needs_them():
    asked = restarts(9, [Failure()], least=3)
    assert asked.after(137, KILLED, ranks=2, since=0.0) is None
    assert asked.told == "no plan of this recipe fits the devices that are left, so the run is not restarted"


def test_torchruns_restarts_are_told_too():
    words = restart_in_words({"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"})
    assert words == "restart 2 of 3 by torchrun"
    assert not may_change_ranks({"TORCHELASTIC_MAX_RESTARTS": "0"}, has_begun=True) and not may_change_ranks({}, has_begun=True)


@pytest.mark.parametrize(("count", "may"), [(0, False), (1, True)])
def test_a_run_without_checkpoints_changes_ranks_where_it_failed_before(count, may):
    told = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": str(count)}
    assert may_change_ranks(told, has_begun=False) == may and may_change_ranks(told, has_begun=True)


# ------------------------------------------------------------------------------------------------ meshes that fit


@pytest.mark.parametrize(
    ("axes", "ranks", "fitted"),
    [
        (["replicate=4"], 3, (3, 1)),
        (["replicate=4"], 1, (1, 1)),
        (["replicate=1", "shard=4"], 3, (1, 3)),
        (["shard=4"], 2, (1, 2)),
        (["replicate=2", "shard=2"], 2, (1, 2)),
        (["replicate=2", "shard=2"], 3, (3, 1)),
        (["replicate=2", "shard=2"], 6, (3, 2)),
        (["replicate=2", "space=[2,1]"], 2, (1, 1)),
        (["replicate=1", "shard=2", "channel=2"], 2, (1, 1)),
    ],
)
def test_copies_and_shards_are_fitted_to_the_ranks_that_are_left(axes, ranks, fitted):
    config = read_config("digits", [f"mesh.{axis}" for axis in axes])
    found, why = refit(config, ranks)
    assert (found.mesh.replicate, found.mesh.shard) == fitted and f"{ranks} ranks go on with this run" in why
    assert plan_of(found, ranks).ranks == ranks
    check(plan_of(found, ranks), ranks=ranks, samples_per_step=64)


def test_a_mesh_that_fits_stays():
    for axes, ranks in ((["replicate=3"], 3), ([], 5), (["shard=2"], 4)):
        config: RunConfig = read_config("digits", [f"mesh.{axis}" for axis in axes])
        assert refit(config, ranks) == (config, None)


def test_axes_that_cut_images_and_layers_are_not_fitted():
    config = read_config("digits", ["mesh.replicate=1", "mesh.space=[2,1]", "mesh.stage=2"])
    with pytest.raises(ValueError, match=r"3 ranks are left of the 4 .*mesh.space=\[2, 1\].* need a multiple of 4; start that"):
        refit(config, 3)


def test_the_command_knows_the_options():
    assert (["r.yaml", "--max-restarts", "3", "--min-ranks", "1"], {"max_restarts": 3, "min_ranks": 1}) in CASES


def test_ranks_of_another_launcher_are_not_ours_to_restart(monkeypatch, capsys, tmp_path):
    for name, value in {**torchrun.CASES[0][0], "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "--run", str(tmp_path), "mesh.replicate=8", "--max-restarts", "2"])
    assert ended.value.code == 2
    assert "--max-restarts is for ranks that this command starts, and torchrun started this one" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ real processes

DRIVER = """
import json, os, sys
from widefield.launchers import local
from widefield.launchers._forking import Forking
from widefield.launchers._restarting import Again, Failure, Restarts
way, worker = sys.argv[1:]
restarts = Restarts(2, failure_since=lambda since: Failure(), starts=lambda most: Again(most, ["again"]) if most > 0 else None)
if way == "started":
    status = local.start(2, ["first"], grace_seconds=20, program=[sys.executable, "-c", worker], restarts=restarts)
else:
    forked = Forking([sys.executable, "-c", os.environ["TEST_FORKED"], worker, "digits"], local.new_run_id())
    status = local.start(2, ["first"], grace_seconds=20, forked=forked, restarts=restarts)
    forked.end()
sys.exit(status)
"""
FORKED = """
import sys
import numpy.random
worker = sys.argv.pop(1)
from widefield import forked_ranks
forked_ranks.load_all_of = lambda data: None
if forked_ranks.main():
    exec(worker)
"""
WORKER = """
import os, pathlib, signal, sys, time
rank, here = os.environ["RANK"], pathlib.Path(os.environ["TEST_FOLDER"])
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
(here / f"{count}.{rank}.{sys.argv[1]}.{os.environ['WORLD_SIZE']}.{os.getpid()}").touch()
def all_here():
    while len(list(here.glob(f"{count}.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
"""


def launched(folder: Path, way: str, body: str) -> subprocess.Popen:
    environment = os.environ | {"TEST_FOLDER": str(folder), "TEST_FORKED": FORKED}
    command = [sys.executable, "-c", DRIVER, way, WORKER + body]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def starts_in(folder: Path) -> list[list[str]]:
    return sorted(place.name.split(".")[:4] for place in folder.iterdir())


@pytest.mark.alone
@pytest.mark.parametrize("way", ["started", "forked"])
def test_killed_ranks_are_started_again_and_then_on_fewer(way, tmp_path):
    body = "all_here()\nos.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(0 if count == '2' else 60)"
    process = launched(tmp_path, way, body)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert starts_in(tmp_path) == [
        ["0", "0", "first", "2"], ["0", "1", "first", "2"], ["1", "0", "again", "2"], ["1", "1", "again", "2"],
        ["2", "0", "again", "1"],
    ]  # fmt: skip
    assert told.count("rank 1 was killed by SIGKILL") == 2
    assert "widefield: restart 1 of 2, on 2 ranks," in told and "widefield: restart 2 of 2, on 1 rank," in told


@pytest.mark.alone
def test_ranks_that_are_asked_to_stop_are_not_started_again(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nall_here()\nwhile True: time.sleep(0.1)"
    process = launched(tmp_path, "forked", body)
    deadline = time.monotonic() + 60
    while len(starts_in(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75 and len(starts_in(tmp_path)) == 2


@pytest.mark.alone
def test_what_forks_ranks_is_started_anew_where_it_was_killed(tmp_path):
    body = (
        "all_here()\nif count == '0':\n    os.kill(os.getppid(), signal.SIGKILL) if rank == '0' else None\n    time.sleep(60)"
    )
    process = launched(tmp_path, "forked", body)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert [start[0] for start in starts_in(tmp_path)] == ["0", "0", "1", "1"]
