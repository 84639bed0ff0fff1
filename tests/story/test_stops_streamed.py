"""A streamed run that is asked to stop between the tiles of an image goes on as if it had not been."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from command import RECIPES, fingerprint, losses

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.streaming import progress
from widefield.streaming.runner import Runner
from widefield.training import abandon, heartbeat
from widefield.training.loop import Learner

STREAMED = str(RECIPES / "page_streamed.yaml")
PAGES = ["data.options.size=[70, 59]", "data.options.pages=[3, 3]", "data.batch_size=2", "data.workers=0", "precision=float64",
         "model.options.widths=[4, 6]", "optimizer.lr=0.03", "schedule.length=4step", "schedule.warmup=2step",
         "evaluate.every=9ep", "log.tensorboard=false", "stream.tiles=[2, 3]"]  # fmt: skip


@pytest.mark.long
def test_a_streamed_step_is_given_up_between_tiles(tmp_path, monkeypatch):
    def train_to(folder: Path) -> tuple:
        outcome = train(read_config(STREAMED, PAGES), folder, World())
        return outcome.reason, outcome.step

    monkeypatch.setattr(abandon, "SLOW_SECONDS", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_pass", timed := _Signalling(Learner._pass))
        assert train_to(tmp_path / "cut") == ("interrupted", 2) and not timed.ended, "the signal came when the pass was over"
    assert train_to(tmp_path / "cut") == train_to(tmp_path / "whole") == ("complete", 4)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert fingerprint(tmp_path / "cut", ranks=1) == fingerprint(tmp_path / "whole", ranks=1)


@pytest.mark.long
def test_a_long_streamed_step_says_its_tile(tmp_path, monkeypatch, capfd):
    real = Runner.steps

    def slow(self, *arguments) -> None:
        time.sleep(0.4 * (len(waited) in (4, 20)))  # one forward tile and one backward tile
        waited.append(torch.is_grad_enabled())
        real(self, *arguments)

    waited: list[bool] = []
    monkeypatch.setattr(heartbeat, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(Runner, "steps", slow)
    train(read_config(STREAMED, [*PAGES, "schedule.length=2step", "schedule.warmup=1step"]), tmp_path / "run", World())
    said = capfd.readouterr().out
    assert progress.in_words() is None
    for tile in (4, 20):
        direction = "backward" if waited[tile] else "forward"
        assert re.search(rf"step \d of 2: {direction}, segment \d of \d, tile \d of 6, for 0 s\n", said), said


class _Signalling:
    """Passes of a learner; SIGTERM comes 20 ms after the beginning of that of step 3, which takes some hundred."""

    def __init__(self, real) -> None:
        self.real, self.ended = real, False

    def __get__(self, learner, kind):
        def run(*arguments, **options) -> None:
            if learner.step == 2:
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM)).start()
            self.real(learner, *arguments, **options)
            self.ended = learner.step == 2

        return run
