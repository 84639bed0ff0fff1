"""A recipe end to end, on each kind of device: trained, stopped and resumed, evaluated, and asked about images."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from command import DIGITS, fingerprint, forget_after, record
from devices import on_gpu_too
from ranks import on_ranks

from widefield.api import predict
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.inference import evaluate_run
from widefield.run import train

pytestmark = pytest.mark.alone

SHORT = ["data.batch_size=120", "schedule.length=2ep", "schedule.warmup=2step", "evaluate.every=1ep", "log.tensorboard=false"]
OFTEN = ["checkpoint.every=1step", "checkpoint.keep_last=100"]
STOPPED = 13
"""Of 24 steps; the first epoch has 12."""
OTHERWISE = {"float32": 0, "bfloat16": 4}
"""Images of 360 that may be answered otherwise one by one than in batches: numbers near a tie are rounded in another order."""


class Told(NamedTuple):
    """What the parts of the package say of a run: how it ended, its evaluation's images and metrics, right answers of 360."""

    reason: str
    images: int
    metrics: dict[str, float]
    right: int


def trained(mesh, folder: Path, settings: list[str]) -> str:
    exact = f"deterministic={str(mesh.device.type == 'cuda').lower()}"
    return train(read_config(DIGITS, [*SHORT, exact, *settings]), folder, mesh.world).reason


def told(mesh, folder: Path, settings: list[str]) -> Told:
    reason, evaluation = trained(mesh, folder, settings), evaluate_run(folder, [], mesh.world)
    dataset = open_dataset(read_config(DIGITS).data)
    images, labels = zip(*(dataset.evaluate.read(number) for number in range(len(dataset.evaluate))), strict=True)
    answers = predict(folder, images, top=1, weights="last")
    right = sum(answer.classes == [dataset.classes[label]] for answer, label in zip(answers, labels, strict=True))
    return Told(reason, evaluation.images, evaluation.metrics, right)


@on_gpu_too
@pytest.mark.parametrize("precision", OTHERWISE)
def test_a_recipe_trains_resumes_evaluates_and_answers(precision, tmp_path):
    whole, cut, settings = tmp_path / "whole", tmp_path / "cut", [f"precision={precision}"]
    (found,) = on_ranks(1, told, whole, settings)
    assert found.reason == "complete" and found.images == 360
    assert found.metrics == record(whole, "evaluation")[-1]["metrics"], "evaluated again, a run says what it said at its end"
    assert found.metrics["top1"] > 70, "of ten classes; it has learnt"
    assert abs(found.right - round(3.6 * found.metrics["top1"])) <= OTHERWISE[precision]
    on_ranks(1, trained, cut, [*settings, *OFTEN])
    forget_after(cut, STOPPED)
    assert on_ranks(1, trained, cut, settings) == ["complete"]
    assert record(cut, "start")[-1]["resumed_from"] == STOPPED
    assert fingerprint(whole, ranks=1) == fingerprint(cut, ranks=1)
