"""A run that is watched: a rank that does not come is named, and steps are recorded as a timeline."""

from __future__ import annotations

import json

import pytest
from command import DIGITS, losses, run

pytestmark = pytest.mark.alone

SLEEPY = """
import os
import time

from torch import nn

class Sleepy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.calls = 0

    def forward(self, image):
        self.calls += 1
        if self.calls == 8 and os.environ.get("RANK") == "1":
            time.sleep(1.5)
        return self.layers(image)

def build(in_channels, num_classes):
    return Sleepy()
"""


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_the_steps_are_a_timeline(tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    text = run(
        "train", DIGITS, "model.name=sleepy:build", "model.options={}", "schedule.length=8step", "schedule.warmup=0step",
        "mesh.replicate=2", "log.stall_seconds=0.4", "log.timeline=true", "--run", tmp_path / "run", cwd=tmp_path,
    )  # fmt: skip
    warnings = [line for line in text.splitlines() if line.startswith("warning: step ")]
    assert warnings and all("1 of 2 ranks has not arrived: rank 1 is at sleepy.py:16 in forward" in line for line in warnings)
    assert len(losses(tmp_path / "run")) == 8 and "trained to the end" in text
    for rank in range(2):
        events = json.loads((tmp_path / "run" / f"timeline-rank{rank}.json").read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("step 3 of this process") == names.count("step 8 of this process") == 1
        assert names.count("gloo:all_reduce") >= 6


@pytest.mark.long
def test_a_watch_that_is_off_says_nothing(tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    text = run(
        "train", DIGITS, "model.name=sleepy:build", "model.options={}", "schedule.length=8step", "schedule.warmup=0step",
        "mesh.replicate=2", "log.stall_seconds=", "--run", tmp_path / "run", cwd=tmp_path,
    )  # fmt: skip
    assert "has not arrived" not in text and not list((tmp_path / "run").glob("timeline-*"))
