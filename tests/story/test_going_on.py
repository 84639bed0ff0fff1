"""A run goes on without a person: after a kill, on other ranks, after a stop; and ends in words where it cannot."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from accounted import FOLDER, problems_of
from command import DIGITS, fingerprint, forget_after, losses, ranks_of, record, run, start, wait_for_step
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training import endings, trainer
from widefield.training.endings import Failure, failure_since, stop_that_stands

alone = pytest.mark.alone
TESTS = Path(__file__).parents[1]
STEPS = 46
DROPPING = ["data.name=accounted:open_dataset", f"schedule.length={STEPS}step", "schedule.warmup=5step", "data.workers=0",
            "checkpoint.every=10step", "model.options.dropout=0.1", "evaluate.every=100ep",
            "log.tensorboard=false"]  # fmt: skip
SHORT = ["schedule.length=4step", "schedule.warmup=0step", "evaluate.every=100step", "checkpoint.every=100step",
         "log.tensorboard=false", "data.batch_size=60", "mesh.replicate=1"]  # fmt: skip


def begin(folder: Path, *arguments: str) -> subprocess.Popen:
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {FOLDER: str(folder / "seen")}
    return start("train", DIGITS, *DROPPING, "--run", folder / "run", *arguments, cwd=TESTS, env=environment)


def finished(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


# ---------------------------------------------------------------------------------------------- kills


@alone
def test_a_killed_rank_is_replaced_and_nothing_is_lost(tmp_path):
    shared = set(os.listdir("/dev/shm"))
    finished(begin(tmp_path / "whole", "mesh.replicate=2"))
    process = begin(tmp_path / "cut", "mesh.replicate=2", "--max-restarts", "1")
    wait_for_step(process, tmp_path / "cut/run", 25)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks_of(process)[1].kill()
    told = finished(process)
    assert "widefield: rank 1 was killed by SIGKILL" in told
    assert "widefield: restart 1 of 1, on 2 ranks, from the newest sound checkpoint" in told
    lines = [line["text"] for line in record(tmp_path / "cut/run", "warning")]
    assert any(re.match("restart 1 of 1 on 2 ranks, since rank .* lost another rank|restart 1 of 1 .* SIGKILL", line)
               for line in lines), lines  # fmt: skip
    assert record(tmp_path / "cut/run", "start")[-1]["resumed_from"] in (10, 20)
    assert fingerprint(tmp_path / "cut/run", ranks=2) == fingerprint(tmp_path / "whole/run", ranks=2)
    for folder in ("whole", "cut"):
        assert problems_of(tmp_path / folder / "seen", steps=STEPS, batch=64) == []
    assert psutil.wait_procs(family, timeout=10)[1] == [] and set(os.listdir("/dev/shm")) <= shared


DIES = """
import os, signal
from torch import nn
class Dies(nn.Flatten):
    def forward(self, x):
        self.passes = getattr(self, "passes", 0) + self.training
        if os.environ["RANK"] == "1" and self.passes == 9:
            os.kill(os.getpid(), signal.SIGKILL) if os.environ["HOW"] == "kill" else 1 / 0
        return super().forward(x)
def build(in_channels, num_classes):
    return nn.Sequential(Dies(), nn.Linear(64, num_classes))
"""


@alone
@pytest.mark.long
def test_what_fails_at_the_same_step_again_ends_the_run_or_goes_on_with_fewer_ranks(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    settings = ["model.name=dies:build", "model.options={}", "mesh.replicate=2", "schedule.length=1ep", "schedule.warmup=0ep"]
    said = ["--max-restarts", "5", "data.batch_size=200", "checkpoint.every=100ep"]
    options = {"cwd": tmp_path, "env": os.environ | {"HOW": "raise"}}
    told = run("train", DIGITS, "--run", tmp_path / "a", *settings, *said, status=1, **options)
    assert told.count("ZeroDivisionError: division by zero\n") == 2
    assert told.rstrip().endswith("in the same words, so it is not restarted")
    told = run("train", DIGITS, "--run", tmp_path / "b", *settings, *said, "--min-ranks", "1", **options)
    assert "widefield: restart 2 of 5, on 1 rank, from the newest sound checkpoint" in told
    assert record(tmp_path / "b", "end")[-1]["reason"] == "complete"


@alone
@pytest.mark.long
@pytest.mark.sweep
def test_a_single_rank_is_watched_too_and_a_bad_recipe_is_not_tried_again(tmp_path):
    process = begin(tmp_path / "one", "mesh.replicate=1", "--max-restarts", "1")
    wait_for_step(process, tmp_path / "one/run", 15)
    ranks_of(process)[0].kill()
    finished(process)
    assert problems_of(tmp_path / "one/seen", steps=STEPS, batch=64) == []
    told = finished(begin(tmp_path / "bad", "mesh.replicate=2", "--max-restarts", "5", "data.hold_out=0.5"), status=2)
    assert told.rstrip().endswith("the same error would come again, so the run is not restarted") or "restart" not in told
    told = finished(begin(tmp_path / "few", "mesh.replicate=2", "--max-restarts", "5", "--min-ranks", "3"), status=2)
    assert "--min-ranks 3 is above the 2 ranks that the run starts on; set it to 2 at most" in told


# ---------------------------------------------------------------------------------------------- torchrun


def torchrun(folder: Path, *launch: str, axes: str = "mesh.replicate=2", settings: tuple[str, ...] = ()) -> subprocess.Popen:
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {FOLDER: str(folder / "seen"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "widefield", "train", DIGITS, *DROPPING, axes,
               "--run-dir", str(folder / "run"), *settings]  # fmt: skip
    return subprocess.Popen(command, cwd=TESTS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_below(process: subprocess.Popen) -> list[psutil.Process]:
    """The ranks that torchrun has started, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        rank = child.environ().get("RANK")
        if rank is not None and child.ppid() == process.pid:
            found[int(rank)] = child
    return [found[rank] for rank in sorted(found)]


@alone
@pytest.mark.long
def test_torchruns_restart_resumes(tmp_path):
    finished(begin(tmp_path / "whole", "mesh.replicate=2"))
    process = torchrun(tmp_path / "cut", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    wait_for_step(process, tmp_path / "cut/run", 25)
    ranks_below(process)[1].kill()
    finished(process)
    assert [line["text"] for line in record(tmp_path / "cut/run", "warning")] == ["restart 1 of 1 by torchrun"]
    assert fingerprint(tmp_path / "cut/run", ranks=2) == fingerprint(tmp_path / "whole/run", ranks=2)


@alone
@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("most", few([0, 3], 3, is_sweep=True))
def test_torchrun_sees_a_run_that_was_asked_to_stop_and_does_not_go_on_with_it(tmp_path, most):
    """torchrun restarts what ends with 75 where it may; the run then ends at once, and torchrun with 1."""
    process = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(most))
    wait_for_step(process, tmp_path / "run", 5)
    ranks_below(process)[1].send_signal(signal.SIGUSR1)
    ranks_below(process)[0].send_signal(signal.SIGUSR1)
    told = finished(process, status=1)
    end = record(tmp_path / "run", "end")[-1]
    assert end["reason"] == "interrupted" and losses(tmp_path / "run")[-1:] and end["step"] < STEPS
    stopped = json.loads((tmp_path / "run/stopped.json").read_text())
    assert stopped == {"step": end["step"], "signal": "SIGUSR1"}
    assert told.count("torchrun restarts it all the same: it ends, to be continued") == most
    assert re.search(r"exitcode\s*: 75", told)
    finished(begin(tmp_path, "mesh.replicate=2"))
    assert not (tmp_path / "run/stopped.json").exists()
    assert problems_of(tmp_path / "seen", steps=STEPS, batch=64) == []


@alone
@pytest.mark.sweep
def test_torchrun_goes_on_with_the_nodes_that_are_left(tmp_path):
    """Two agents, one of which is killed with its rank: the other goes on with a world of one, as mesh.shard=2 allows."""
    finished(begin(tmp_path / "whole", "mesh.replicate=1", "precision=float64"))
    settings = ("precision=float64", "schedule.length=46step")
    launch = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "7",
              "--rdzv-endpoint", "127.0.0.1:29641", "--rdzv-conf", "last_call_timeout=3,join_timeout=60"]  # fmt: skip
    first = torchrun(tmp_path / "cut", *launch, axes="mesh.shard=2", settings=settings)
    time.sleep(1)
    second = torchrun(tmp_path / "cut", *launch, axes="mesh.shard=2", settings=settings)
    wait_for_step(first, tmp_path / "cut/run", 12)
    for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
        process.kill()
    second.communicate()
    finished(first)
    assert record(tmp_path / "cut/run", "start")[-1]["ranks"] == 1
    assert losses(tmp_path / "cut/run") == pytest.approx(losses(tmp_path / "whole/run"), rel=1e-5)
    assert problems_of(tmp_path / "cut/seen", steps=STEPS, batch=64) == []


# ---------------------------------------------------------------------------------------------- other ranks


def go(mesh, folder: Path, settings: list[str], seen: Path, start: str) -> list[float]:
    import accounted

    os.environ |= {FOLDER: str(seen), "ACCOUNTED_START": start}
    try:
        train(read_config(DIGITS, settings), folder, World() if mesh is None else mesh.world)
    finally:
        accounted.Learner.learn = accounted._learn
    return losses(folder)


RANKS = [(before, after) for before in (1, 2, 3, 4) for after in (1, 2, 3, 4) if before != after]


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), few(RANKS, (2, 3), is_sweep=True))
def test_dropout_goes_on_on_other_ranks_as_if_nothing_had_changed(before, after, tmp_path):
    """Every rank draws for the whole batch, so the states of one are those of all."""
    settings = [*DROPPING, "schedule.length=12step", "precision=float64", "checkpoint.every=5step", "checkpoint.keep_last=9"]
    seen = tmp_path / "seen"
    seen.mkdir()
    whole = on_ranks(before, go, tmp_path / "run", [*settings, f"mesh.replicate={before}"], seen, "first")[0]
    forget_after(tmp_path / "run", 5)
    again = on_ranks(after, go, tmp_path / "run", [*settings, f"mesh.replicate={after}"], seen, "second")[0]
    assert again == pytest.approx(whole, rel=1e-9, abs=0) and again != whole and len(again) == 12
    assert problems_of(seen, steps=12, batch=64) == []


# ---------------------------------------------------------------------------------------------- stops


def stopping(monkeypatch, at: int, number: signal.Signals) -> None:
    """The process gets a signal in the step after `at`."""
    real = trainer.Trainer.step

    def step(self, passes, *, stop):
        if self.learner.step == at:
            signal.raise_signal(number)
        return real(self, passes, stop=stop)

    monkeypatch.setattr(trainer.Trainer, "step", step)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_stopped_run_says_how_it_ended_and_a_finished_one_does_not(tmp_path, monkeypatch, number, status):
    stopping(monkeypatch, 1, number)
    outcome = train(read_config(DIGITS, SHORT), tmp_path / "run", World())
    assert (outcome.reason, outcome.status) == ("interrupted", status)
    assert json.loads((tmp_path / "run/stopped.json").read_text()) == {"step": outcome.step, "signal": number.name}
    monkeypatch.undo()
    assert train(read_config(DIGITS, SHORT), tmp_path / "run", World()).status == 0
    assert not (tmp_path / "run/stopped.json").exists()


def test_a_save_that_fails_does_not_keep_a_stopped_run_from_ending(tmp_path, monkeypatch, capsys):
    """From the signal on nothing fits on the disk but the record."""
    real = trainer.Trainer._save

    def save(self, *, wait):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for place in ("checkpoint_directory.make_anew", "tensors.write"):
            monkeypatch.setattr(f"widefield.training.{place}", full)
        monkeypatch.setattr(trainer, "write_weights", full)
        monkeypatch.setattr(trainer, "write_stopped", full)
        real(self, wait=wait)

    monkeypatch.setattr(trainer.Trainer, "_save", save)
    stopping(monkeypatch, 1, signal.SIGTERM)
    outcome = train(read_config(DIGITS, SHORT), tmp_path / "run", World())
    assert (outcome.reason, outcome.status) == ("interrupted", 75)
    told = capsys.readouterr().out
    assert f"the checkpoint of step {outcome.step} was not saved" in told and outcome.step < 4
    assert f"stopped at step {outcome.step} of 4; the same command goes on from the newest checkpoint" in told


def test_torchrun_is_not_followed_where_a_stop_stands(tmp_path):
    endings.write_stopped(tmp_path, step=7, by=signal.SIGUSR1)
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert stop_that_stands(tmp_path, restarted) == 7
    assert stop_that_stands(tmp_path, {}) is None and stop_that_stands(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"}) is None
    endings.write_stopped(tmp_path, step=7, by=signal.SIGTERM)  # as torchrun sends where another rank or node has failed
    assert stop_that_stands(tmp_path, restarted) is None
    for text in ("{", "[]", "{}", '{"step": "x", "signal": "SIGUSR1"}'):
        (tmp_path / "stopped.json").write_text(text)
        assert stop_that_stands(tmp_path, restarted) is None
    endings.forget_stopped(tmp_path)
    endings.forget_stopped(tmp_path)
    assert stop_that_stands(tmp_path, restarted) is None


def test_what_failed_is_read_from_the_record(tmp_path):
    assert failure_since(tmp_path, 0.0) == Failure()
    lines = [{"kind": "step", "time": 10.0, "step": 4}, {"kind": "step", "time": 20.0, "step": 5}]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failure_since(tmp_path, 15.0) == Failure(5, True, "")
    end = {"kind": "end", "time": 30.0, "reason": "failed", "step": 5, "text": "no memory"}
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    assert failure_since(tmp_path, 25.0) == Failure(5, False, "no memory") and failure_since(tmp_path, 35.0).words == ""
    (tmp_path / "record.jsonl").write_text("no json\n\n")
    assert failure_since(tmp_path, 0.0) == Failure()
