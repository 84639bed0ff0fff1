"""Are the scores of an evaluation the same on ranks and tiles, and do its files and the report show labels of every kind?"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import CLASSES, TASKS, images_of, net_for
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, parse_config
from widefield.plans import Plan
from widefield.report.page import write_report
from widefield.run import train
from widefield.training.assemble import assemble, evaluate_parts, learner_of
from widefield.training.given import Given
from widefield.training.scores import rows_of, table_in_words

METRICS = {
    "class": "[top2, f1, kappa, balanced_accuracy, auc, average_precision]",
    "classes": "[recall, auc]",
    "values": "[]",  # torchmetrics' own sums are of float32
    "pixels": "[dice_cases, iou_cases, {surface: {spacing: [2, 1]}}, kappa]",
    "layers": "[dice_cases, surface]",
    "image": "[{swd: {levels: 1}}]",
}
CONFIG = """
model: {name: unet}
data: {name: page, batch_size: 5, workers: 0, evaluate_batch_size: 2}
optimizer: {name: sgd, lr: 0.1}
schedule: {name: constant, length: 1step}
precision: float64
"""


def config(labels: str) -> RunConfig:
    return parse_config(CONFIG, [f"task.name={TASKS[labels]}", f"task.metrics={METRICS[labels]}"])


def evaluated(mesh: Mesh) -> dict[str, tuple[dict[str, float], dict[str, list[float]], list[str]]]:
    """Metrics, columns, and the metrics that were gathered, of every kind of labels."""
    found = {}
    for labels in TASKS:
        parts = assemble(config(labels), mesh, images_of(labels), given=Given(model=net_for(labels)))
        learner, _ = learner_of(parts)
        one = evaluate_parts(parts, learner.model)
        assert one.images == one.of == 5 and one.duplicates == 0
        found[labels] = one.metrics, one.columns, one.gathered
    return found


def flat(found: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for labels, (metrics, columns, _) in found.items():
        numbers |= {f"{labels} {name}": value for name, value in metrics.items()}
        numbers |= {f"{labels} {name} {row}": value for name, column in columns.items() for row, value in enumerate(column)}
    return numbers


@pytest.mark.parametrize("plan", few([Plan(replicate=2), Plan(replicate=2, space=[2, 1])], Plan(replicate=2)), ids=str)
def test_scores_of_ranks_and_tiles_are_those_of_one_rank(plan):
    alone = evaluated(Mesh(Plan(), World(), torch.device("cpu")))
    assert {labels: gathered for labels, (*_, gathered) in alone.items() if gathered} == {
        "class": ["auc", "average_precision"], "classes": ["auc"]}  # fmt: skip
    for found in on_ranks(plan.ranks, evaluated, plan=plan):
        assert flat(found) == pytest.approx(flat(alone), rel=1e-10, nan_ok=True)


@pytest.mark.parametrize("labels", list(TASKS))
def test_every_kind_of_labels_has_files_and_a_report(labels, tmp_path):
    folder = tmp_path / "run"
    outcome = train(config(labels), folder, World(), Given(net_for(labels), lambda: images_of(labels)))
    assert outcome.status == 0 and outcome.evaluation is not None
    text = write_report(folder).read_text(encoding="utf-8")
    values = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    rows = list(csv.reader((folder / "evaluation.csv").read_text(encoding="utf-8").splitlines()))
    assert rows == rows_of(outcome.evaluation)
    if labels == "image":  # nothing of classes
        assert outcome.evaluation.metrics["swd"] > 0 and text.count('class="sample"') == 4 and "Where it was wrong" not in text
        return
    assert [row[0] for row in rows[1:]] == ["a", "b", "c", "mean"]
    assert len(table_in_words(outcome.evaluation)) >= CLASSES + 2
    assert ("Every value" if labels == "values" else "Every class") in text
    if labels in ("pixels", "layers"):
        assert len(values["samples"]) == 4 and text.count('class="sample"') == 4
    else:
        assert values["mistakes"] and "Worst mistakes" in text and "picture missing" not in text
        assert (values["mistakes"][0]["probability"] is None) == (labels != "class")


def test_columns_hold_no_value_that_json_has_not(tmp_path):
    folder: Path = tmp_path / "run"
    train(config("pixels"), folder, World(), Given(net_for("pixels"), lambda: images_of("pixels")))
    columns = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"), parse_constant=lambda text: "not JSON")[
        "columns"
    ]
    assert columns["hd95"][0] is None, "class 0 has no surface"
