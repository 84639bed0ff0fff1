"""A run that is asked to stop in a long step stops at once and loses nothing; a long step says where it is; callbacks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from command import DIGITS, fingerprint, losses, record
from marks import few
from ranks import RankFailed, on_ranks

import widefield as wf
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training import abandon, heartbeat
from widefield.training.loop import Learner
from widefield.training.run_events import CallbackError, EndFacts, EvaluationFacts, StepFacts

SETTINGS = ["schedule.length=4step", "schedule.warmup=0step", "evaluate.every=100step", "checkpoint.every=100step",
            "data.batch_size=60", "log.tensorboard=false", "gradient.accumulate=3", "mesh.replicate=1"]  # fmt: skip


def stopped(mesh, folder: Path, settings: list[str], at: int) -> list:
    """A run whose rank 0 gets SIGTERM in the second pass of the step after `at`, with every step taken for a long one."""
    real, passes, abandon.SLOW_SECONDS = Learner._pass, [0], -1.0

    def signalling(self, *arguments, **options):
        passes[0] += self.step == at
        if passes[0] == 2 and self.mesh.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, *arguments, **options)

    Learner._pass = signalling
    try:
        outcome = train(read_config(DIGITS, settings), folder, World() if mesh is None else mesh.world)
    finally:
        Learner._pass, abandon.SLOW_SECONDS = real, 5.0
    return [outcome.reason, outcome.step, passes[0]]


@pytest.mark.parametrize("at", few([0, 2], 2))
def test_a_long_step_is_given_up_and_the_resumed_run_equals_one_that_was_not_stopped(at, tmp_path, capfd):
    assert stopped(None, tmp_path / "cut", SETTINGS, at) == ["interrupted", at, 2]
    assert (
        "widefield: SIGTERM: the run saves after this step, or gives it up if it is long, and stops;" in capfd.readouterr().err
    )
    assert len(losses(tmp_path / "cut")) == at and (tmp_path / f"cut/checkpoints/step_{at:08}").is_dir()
    for folder in ("cut", "whole"):
        assert train(read_config(DIGITS, SETTINGS), tmp_path / folder, World()).reason == "complete"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert fingerprint(tmp_path / "cut", ranks=1) == fingerprint(tmp_path / "whole", ranks=1)


def trained(mesh, folder: Path, settings: list[str]) -> str:
    return train(read_config(DIGITS, settings), folder, mesh.world).reason


@pytest.mark.long
def test_ranks_give_up_a_long_step_between_the_same_passes(tmp_path):
    settings = [*SETTINGS, "mesh.replicate=2"]
    assert on_ranks(2, stopped, tmp_path / "cut", settings, 2) == [["interrupted", 2, 2]] * 2
    for folder in ("cut", "whole"):
        assert on_ranks(2, trained, tmp_path / folder, settings) == ["complete"] * 2
    assert fingerprint(tmp_path / "cut", ranks=2) == fingerprint(tmp_path / "whole", ranks=2)


def test_a_long_step_says_step_and_pass(tmp_path, monkeypatch, capfd):
    real = Learner._pass

    def slow(self, *arguments, **options):
        time.sleep(0.4 * (self.pass_number == 2 and self.step == 1))
        real(self, *arguments, **options)

    monkeypatch.setattr(heartbeat, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(Learner, "_pass", slow)
    train(read_config(DIGITS, SETTINGS), tmp_path / "run", World())
    assert re.search(r"step 2 of 4: pass 2 of 3, for 0 s\n", capfd.readouterr().out)


def test_a_line_comes_by_time_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("widefield.training.record.QUIET_SECONDS", 0.0)
    train(read_config(DIGITS, [*SETTINGS, "log.every=1000"]), tmp_path / "run", World())
    said = capsys.readouterr().out
    assert [step for step in range(1, 5) if f"step {step}/4  ep " in said] == [1, 2, 3, 4]
    assert re.search(r" img/s  data [\d.]+ %  process [\d.]+ [MG]iB  lr ", said)
    assert record(tmp_path / "run", "start")[0]["memory_of"] == "process"
    assert "peak memory of the process" in (tmp_path / "run/report.html").read_text()


# ---------------------------------------------------------------------------------------------- callbacks


class Notes:
    def __init__(self, fails: int | None = None) -> None:
        self.steps, self.evaluations, self.ends, self.fails = [], [], [], fails

    def on_step(self, facts: StepFacts) -> None:
        if facts.step == self.fails and facts.rank == 0:
            raise KeyError("no such thing")
        self.steps.append(facts)

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        self.evaluations.append(facts)

    def on_end(self, facts: EndFacts) -> None:
        self.ends.append(facts)


CALLED = ["schedule.length=4step", "schedule.warmup=0step", "evaluate.every=2step", "log.tensorboard=false"]


def test_callbacks_get_the_facts_of_the_record(tmp_path):
    notes = Notes()
    wf.train("digits", *CALLED, run=tmp_path / "run", callbacks=[notes])
    assert [(one.step, one.loss, one.lr) for one in notes.steps] == [
        (line["step"], line["loss"], line["lr"]) for line in record(tmp_path / "run", "step")
    ]
    assert [(one.step, one.metrics, one.is_best) for one in notes.evaluations] == [
        (line["step"], line["metrics"], line["best"]) for line in record(tmp_path / "run", "evaluation")
    ]
    (end,) = notes.ends
    assert (end.reason, end.step, end.run) == ("complete", 4, tmp_path / "run") and end.best_step in (2, 4)


def calling(mesh, folder: Path) -> None:
    wf.train("digits", *CALLED, "mesh.replicate=2", run=folder, callbacks=[Notes(fails=3)])


@pytest.mark.long
def test_an_exception_in_a_callback_ends_all_ranks_in_words(tmp_path):
    with pytest.raises(
        CallbackError, match=r"the callback Notes.on_step failed at step 3: KeyError: 'no such thing'"
    ) as caught:
        wf.train("digits", *CALLED, run=tmp_path / "run", callbacks=[Notes(fails=3)])
    assert isinstance(caught.value.__cause__, KeyError)
    assert re.search("KeyError: 'no such thing' .at .* in on_step", record(tmp_path / "run", "end")[-1]["text"])
    with pytest.raises(RankFailed, match="the callback Notes.on_step failed at step 3"):
        on_ranks(2, calling, tmp_path / "two")


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (object(), "callbacks has a object, and an object with on_step, on_evaluate, on_end, or some, is wanted"),
        (Notes, "callbacks has the class Notes, and an object with"),
        (type("Odd", (), {"on_step": 3})(), "callbacks has a Odd, whose on_step cannot be called"),
    ],
)
def test_what_is_no_callback_is_refused(callback, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        wf.train("digits", run=tmp_path / "run", callbacks=[callback])


@pytest.mark.alone
@pytest.mark.sweep
def test_a_run_whose_terminal_is_closed_saves_and_is_to_be_continued(tmp_path):
    """The kernel sends it SIGHUP, and whatever it prints from then on fails."""
    command = [sys.executable, "-m", "widefield", "train", "digits", "--run", str(tmp_path / "run"), "mesh.replicate=1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    reader = threading.Thread(target=read_until_closed, args=(terminal,), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/record.jsonl").is_file() or not losses(tmp_path / "run"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert record(tmp_path / "run", "end")[-1]["reason"] == "interrupted"
    assert json.loads((tmp_path / "run/stopped.json").read_text())["signal"] == "SIGHUP"


def read_until_closed(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1000):
            pass
