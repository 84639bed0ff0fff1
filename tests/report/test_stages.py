"""The picture of a pipeline is drawn from the record alone."""

import re

import pytest

from widefield.plans import Plan, to_text
from widefield.report.stages import stages

START = {"kind": "start", "plan": to_text(Plan(replicate=2)), "reasons": ["optimizer.lr: 0.1 by the linear rule"]}
REASONS = ["pipeline.micro_batches=4: 2 per stage, so that stages work at the same time"]


def start(schedule: str = "1f1b", reasons: list[str] = REASONS, **changes) -> dict:
    plan = Plan(**{"stage": 2, "pipeline": {"schedule": schedule}} | changes)
    return START | {"plan": to_text(plan), "reasons": reasons}


def numbers(svg: str) -> list[str]:
    """The words of the picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_every_piece_of_work_is_drawn_and_the_idle_share_is_said():
    drawn = stages(start())
    assert drawn is not None and "20% of the time is idle" in drawn["caption"]  # (2 - 1) / (4 + 2 - 1)
    words = numbers(drawn["picture"])
    assert [words.count(str(number)) for number in range(4)] == [4] * 4, "F and B of each micro-batch on both ranks"
    assert {"stage 0", "stage 1", "forward", "backward"} <= set(words)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("interleaved", {"stages 0, 2", "stages 1, 3", "3'"}),
        ("zero_bubble", {"backward to the input", "backward to the weights"}),
    ],
)
def test_finer_schedules_have_words_of_their_own(schedule, words):
    drawn = stages(start(schedule))
    assert drawn is not None and words <= set(numbers(drawn["picture"]))
    assert ("A prime marks" in drawn["caption"]) == (schedule == "interleaved")


def test_one_micro_batch_is_said_to_be_one():
    drawn = stages(start(reasons=["pipeline.micro_batches=1, as asked"]))
    assert drawn is not None and drawn["caption"].startswith("One micro-batch by 1f1b on 2 ranks")
    assert "50% of the time is idle" in drawn["caption"]


@pytest.mark.parametrize("line", [START, start(stage=1), start(reasons=[]), START | {"plan": "nonsense: ["}, {}])
def test_a_run_without_stages_has_no_picture(line):
    assert stages(line) is None
