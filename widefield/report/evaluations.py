"""The evaluations of a run: names and values of metrics, which one is the best, and their table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from widefield.training.record import Line

_OF_PIXELS = {"iou": "mean IoU", "dice": "mean Dice", "accuracy": "pixels right"}


def metric_name(name: str) -> str:
    return _OF_PIXELS.get(name) or re.sub(r"^top(\d+)$", r"top-\1", name)


def metric_text(name: str, value: float) -> str:
    return f"{value:.2f} %" if name in _OF_PIXELS or re.fullmatch(r"top\d+", name) else f"{value:.4g}"


def best_of(evaluations: Sequence[Line]) -> int | None:
    """The number of the best evaluation; None in records of older versions, which do not say."""
    return max((number for number, line in enumerate(evaluations) if line.get("best") is True), default=None)


def table_of_evaluations(evaluations: Sequence[Line]) -> dict[str, Any]:
    """The table's head and rows, an evaluation each; the best one is marked."""
    names = list(evaluations[-1]["metrics"]) if evaluations else []
    best = best_of(evaluations)
    rows = [
        [f"{line['step']:,}{' (best)' if number == best and len(evaluations) > 1 else ''}", f"{line['epoch']:.2f}"]
        + [metric_text(name, line["metrics"].get(name, float("nan"))) for name in names]
        + [f"{line['loss']:.4g}", f"{line['images']:,}/{line['of']:,}", f"{line['seconds']:.2f} s"]
        for number, line in enumerate(evaluations)
    ]
    return {"head": ["step", "epoch", *map(metric_name, names), "loss", "images", "time"], "rows": rows}
