"""Scores per class: columns and curves of an evaluation, as a table to print and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from widefield.tasks._counts import scores_of
from widefield.training.evaluation import Evaluation

MOST_ROWS = 60
"""A printed table has no more classes than this; the files have all."""


def columns_of_task(values: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """By score a number per class, from what a task counts: `confusion`, `counts` (of several classes) `errors`, or `ap`."""
    if "ap" in values:
        return {"boxes": values["boxes"].tolist(), "ap": values["ap"].tolist()}
    if "errors" in values:
        return {name: column.tolist() for name, column in zip(("rmse", "mae", "r2"), values["errors"].unbind(1), strict=True)}
    if "counts" in values:
        right, false, missed, _ = values["counts"].unbind(1)
        answered, truth = right + false, right + missed
    elif "confusion" in values:
        right, answered, truth = values["confusion"].diag(), values["confusion"].sum(0), values["confusion"].sum(1)
    else:
        return {}
    scores = {name: column.tolist() for name, column in scores_of(right, answered, truth).items()}
    return {"count": truth.tolist(), **scores}


def curves_of_task(values: Mapping[str, Tensor]) -> dict[str, list[list[float]]]:
    """The precision of each class at recalls from 0 to 1 in equal steps, of tasks that find boxes."""
    name = "precision_by_recall"
    return {name: values[name].tolist()} if name in values else {}


def rows_of(evaluation: Evaluation) -> list[list[str]]:
    """The table of an evaluation's columns: a header, a row per class, and the means of the scores; [] without columns.

    Shares are numbers from 0 to 1, an empty cell has no value: the class is neither in the truth nor in the answers.
    """
    columns = {name: values for name, values in evaluation.columns.items() if len(values) == len(evaluation.classes)}
    if not columns:
        return []
    kind = "value" if evaluation.labels == "values" else "class"
    counted = {name for name, values in columns.items() if all(isinstance(value, int) for value in values)}
    rows = [[name, *(_cell(values[row]) for values in columns.values())] for row, name in enumerate(evaluation.classes)]
    means = [_cell(sum(values) if name in counted else _mean(values)) for name, values in columns.items()]
    return [[kind, *columns], *rows, ["mean", *means]]


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    return "" if math.isnan(value) else f"{value:.6g}"


def csv_of(evaluation: Evaluation) -> str:
    """The table as CSV; a mean over classes is of those that have a value, and counts are added up."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows_of(evaluation))
    return text.getvalue()


def table_in_words(evaluation: Evaluation) -> list[str]:
    """What `widefield evaluate` prints: the table of classes, aligned, and which metrics are gathered; a line each."""
    rows = rows_of(evaluation)
    if len(rows) > MOST_ROWS + 2:
        left_out = [f"{len(rows) - 2 - MOST_ROWS:,} more in evaluation.csv", *[""] * (len(rows[0]) - 1)]
        rows = [*rows[: MOST_ROWS + 1], left_out, rows[-1]]
    shown = [[row[0], *(_short(cell) for cell in row[1:])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in shown
    ]
    if evaluation.gathered:
        lines.append(f"{', '.join(evaluation.gathered)}: from all answers, gathered over ranks; the others from sums")
    return lines


def _short(cell: str) -> str:
    """A cell with 4 decimals; a count with commas."""
    if cell.isdigit():
        return f"{int(cell):,}"
    try:
        return f"{float(cell):.4f}"
    except ValueError:
        return cell
