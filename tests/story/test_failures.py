"""Does an error on one rank end all of them within seconds, in words that name the rank and the reason?

What is measured: the seconds from the error to the end of the last rank.  Nothing but widefield ends them here.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from command import RECIPES, record, run
from falling import away, fall, in_backward, killed, nothing, raising, worker_killed
from marks import few

pytestmark = pytest.mark.alone

PAGE = RECIPES / "page.yaml"
SMALL = ["data.options.size=[48, 40]", "data.options.pages=[6, 3]", "data.batch_size=4", "data.evaluate_batch_size=1",
         "model.options={widths: [4, 6]}", "mesh.space=[]", "mesh.replicate=1", "schedule.length=20ep", "data.workers=0",
         "schedule.warmup=1step", "log.tensorboard=false", "evaluate.every=2ep"]  # fmt: skip
MOST_SECONDS = 5.0
"""Alone on two cores all ranks have ended 1 s after the error, 1.5 s after a kill; before, some waited 600 s."""
TASK, LEARNER = "widefield.tasks.segmentation:Segmentation", "widefield.training.loop:Learner"

BEFALLS = {
    "a backward, while others wait in an all-reduce": (
        ["mesh.replicate=2"], partial(in_backward, 1, RuntimeError("planted"), 6), 1, "RuntimeError: planted"),
    "a loss, on the last of the stages": (
        ["mesh.stage=2"], partial(raising, 1, TASK, "loss_sum", KeyError("planted"), 2), 1, "KeyError: 'planted'"),
    "a metric, on the rank that holds the meeting place": (
        ["mesh.shard=2"], partial(raising, 0, TASK, "answers", TypeError("planted"), 1), 0, "TypeError: planted"),
    "an optimizer that finds no memory": (
        ["mesh.channel=2"], partial(raising, 1, LEARNER, "_update", MemoryError("planted"), 2), 1, "MemoryError: planted"),
    "a worker of a loader, where images are cut": (
        ["mesh.space=[2, 1]", "data.workers=1"], partial(worker_killed, 1), 1, "is killed by signal: Killed."),
    "a model that is being built": (
        ["mesh.replicate=2"], partial(raising, 1, "widefield.models.unet:UNet", "__init__", OSError("planted"), 0), 1,
        "OSError: planted"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(BEFALLS, *list(BEFALLS)[:2]))
def test_what_befalls_one_rank_ends_all_and_each_names_it(tmp_path, name):
    mesh, plant, culprit, reason = BEFALLS[name]
    ended = fall(2, ["train", PAGE, "--run", tmp_path / "run", *SMALL, *mesh], plant, folder=tmp_path / "said")
    for rank, one in enumerate(ended):
        last = [line for line in one.said.splitlines() if line.startswith("widefield: ")][-1]
        assert re.search(f"rank {culprit} (failed: |ran out of memory in step)", one.said) and reason in one.said
        assert last.startswith("widefield: rank "), one.said
        is_full = "finds no memory" in name  # which is told in words, with what takes less
        assert ("Traceback" in one.said) == (rank == culprit and not is_full), one.said
        assert one.status == ((2 if is_full else 1) if rank == culprit else 3)
        assert one.seconds < MOST_SECONDS
    if "being built" not in name:
        (end,) = record(tmp_path / "run", "end")
        assert end["reason"] == "failed" and f"rank {culprit} failed: " in end["text"] and reason in end["text"]
        assert ("What takes less memory: " in end["text"]) == ("finds no memory" in name)
        assert "planted" in (tmp_path / "run" / "report.html").read_text() or "killed" in reason


def test_a_killed_rank_is_missed_by_all_in_words(tmp_path):
    """Four ranks: those that have no connection to it wait for others that have."""
    mesh = ["mesh.space=[2, 1]", "mesh.replicate=2", "schedule.length=1000ep"]
    ended = fall(
        4, ["train", PAGE, "--run", tmp_path / "run", *SMALL, *mesh], partial(killed, 2, 5.0), folder=tmp_path / "said"
    )
    assert ended[2].status == -9
    for one in (*ended[:2], ended[3]):
        assert one.status == 3 and one.seconds < MOST_SECONDS, one.said
        assert "lost another rank, which reported no error" in one.said and "Traceback" not in one.said


def test_a_rank_that_does_not_come_back_is_ended_and_the_record_says_why(tmp_path):
    ended = fall(
        2, ["train", PAGE, "--run", tmp_path / "run", *SMALL, "mesh.replicate=2"], partial(away, 1, 0), folder=tmp_path
    )
    assert [one.status for one in ended] == [3, 1] and ended[0].seconds < MOST_SECONDS
    assert "widefield: rank 0 did not come back from tests/falling.py" in ended[0].said and "within 1 s" in ended[0].said
    assert "rank 1 failed: RuntimeError: planted" in record(tmp_path / "run", "end")[-1]["text"]


def test_evaluation_ends_on_all_ranks_too(tmp_path):
    short = [*SMALL, "schedule.length=1step"]
    assert [one.status for one in fall(1, ["train", PAGE, "--run", tmp_path / "run", *short], nothing, folder=tmp_path)] == [0]
    plant = partial(raising, 1, TASK, "answers", KeyError("planted"), 1)
    ended = fall(2, ["evaluate", tmp_path / "run", "mesh.space=[2, 1]"], plant, folder=tmp_path / "said")
    assert [one.status for one in ended] == [3, 1] and max(one.seconds for one in ended) < MOST_SECONDS
    assert all("rank 1 failed: KeyError: 'planted'" in one.said for one in ended)


RAISES = """
import os
from torch import nn
class Raises(nn.Flatten):
    def forward(self, x):
        self.passes = getattr(self, "passes", 0) + 1
        if os.environ["RANK"] == "1" and self.passes == 6:
            raise ZeroDivisionError("planted")
        return super().forward(x)
def build(in_channels, num_classes):
    return nn.Sequential(Raises(), nn.Linear(64, num_classes))
"""


@pytest.mark.long
def test_the_launcher_blames_the_rank_that_failed(tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    settings = ["model.name=raises:build", "model.options={}", "mesh.replicate=2"]
    told = run("train", RECIPES / "digits.yaml", "--run", tmp_path / "run", *settings, status=1, cwd=tmp_path)
    assert told.endswith("widefield: rank 1 ended with exit code 1; its message is above\n")
    failed = "rank 1 failed: ZeroDivisionError: planted (at raises.py:8 in forward)"
    assert f"widefield: {failed}" in told and f"widefield: rank 0: {failed}" in told
    assert record(tmp_path / "run", "end")[-1]["text"] == failed


def test_a_rank_that_nothing_befalls_ends_well_beside_the_watch(tmp_path):
    ended = fall(2, ["train", PAGE, "--run", Path(tmp_path) / "run", *SMALL, "mesh.replicate=2", "schedule.length=2step"],
                 nothing, folder=tmp_path / "said")  # fmt: skip
    assert [one.status for one in ended] == [0, 0] and "trained to the end" in ended[0].said
