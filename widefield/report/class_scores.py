"""The scores of every class of an evaluation, as values for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from widefield.data.image import colours

MOST_ROWS = 300
"""The page has no more classes than this; evaluation.csv has all."""


def class_scores(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The head, and rows of a name, a colour (of classes of pixels, else "") and texts; None without scores."""
    columns = {name: values for name, values in ((evaluation or {}).get("columns") or {}).items() if values}
    if evaluation is None or not columns:
        return None
    names, per_pixel = evaluation["classes"], evaluation.get("unit") == "pixels"
    shown = dict(zip(names_shown(evaluation), colours(len(names_shown(evaluation))), strict=True)) if per_pixel else {}
    rows = [
        (name, "#{:02x}{:02x}{:02x}".format(*shown[name]) if shown else "", [text(values[row]) for values in columns.values()])
        for row, name in enumerate(names[:MOST_ROWS])
    ]
    heads = {"count": evaluation.get("unit", "images"), "iou": "IoU", "f1": "Dice (F1)" if per_pixel else "F1"}
    return {
        "head": [heads.get(name, name.replace("_", " ")) for name in columns],
        "rows": rows,
        "left_out": len(names) - len(rows),
        "of_values": evaluation.get("labels") == "values",
        "gathered": ", ".join(evaluation.get("gathered") or []),
    }


def names_shown(evaluation: Mapping[str, Any]) -> Sequence[str]:
    """The names of the numbers in pictures of labels: the classes or, where a pixel may have several, none and then these."""
    return ["no class", *evaluation["classes"]] if evaluation.get("labels") == "layers" else evaluation["classes"]


def text(value: float | None) -> str:
    """A count with commas, a score with 4 digits, a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
