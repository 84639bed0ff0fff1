"""What the page shows of precision and recall."""

from __future__ import annotations

import pytest
import torch

from widefield.report.precision import precision_curve
from widefield.training.scores import curves_of_task

FALLING = [1.0, 0.5, 0.0]
NONE = [None, None, None]


def told(classes, rows):
    found = precision_curve({"classes": classes, "curves": {"precision_by_recall": rows}})
    assert found is not None
    return found


def test_the_best_and_the_worst_class_are_named_and_those_without_boxes_are_not_counted():
    svg, caption = told(["cat", "dog", "<eel>", "fox"], [FALLING, [1.0, 1.0, 0.9], NONE, [0.1, 0.0, 0.0]])
    assert "best: dog" in svg and "worst: fox" in svg and "eel" not in svg and "cat" not in svg
    assert caption.startswith("At IoU 0.5: 3 of 4 classes, thin, and their mean.")


def test_one_class_has_one_curve():
    svg, caption = told(["<cat>"], [FALLING])
    assert "best" not in svg and "mean" in svg and "1 classes" not in caption
    assert svg == told(["<cat>"], [FALLING])[0], "equal values give equal text"


@pytest.mark.parametrize(
    "evaluation",
    [None, {"classes": ["cat"]}, {"classes": ["cat"], "curves": {}},
     {"classes": ["cat"], "curves": {"precision_by_recall": [NONE]}},
     {"classes": ["cat", "dog"], "curves": {"precision_by_recall": [FALLING]}}],
)  # fmt: skip
def test_without_boxes_there_is_no_picture(evaluation):
    assert precision_curve(evaluation) is None


def test_a_metric_of_ones_own_named_precision_is_no_curve():
    assert curves_of_task({"precision": torch.tensor(0.5)}) == {}
