"""The confusion matrix and the worst mistakes of an evaluation, as values for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from widefield.trust import inside

MATRIX_CLASSES = 40
"""With more classes than this, the most confused pairs are listed in place of the matrix."""
LISTED = 20
PICTURE_PX = 512
"""Longer pictures are scaled down to this, so that the page stays small."""
MOST_PX = 2**24
"""Training writes no larger pictures, and larger ones could fill memory."""
TINY_PX = 64
"""Pictures up to this long are enlarged pixel by pixel."""


def confusion(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The matrix, or for many classes the most confused pairs and the hardest classes.

    Images are shown as counts; pixels, which are too many to read, in percent of their row.
    """
    if evaluation is None or not evaluation.get("confusion"):
        return None
    names, matrix, unit = evaluation["classes"], evaluation["confusion"], evaluation.get("unit", "images")
    if len(names) > MATRIX_CLASSES:
        return {
            "unit": unit,
            "count": len(names),
            "rows": [],
            "pairs": _pairs(names, matrix),
            "hardest": _hardest(names, matrix),
        }
    rows = [
        {
            "name": name,
            "cells": [_cell(count, sum(row), i == j, unit) for j, count in enumerate(row)],
            "recall": _recall(row, i),
        }
        for i, (name, row) in enumerate(zip(names, matrix, strict=True))
    ]
    return {"unit": unit, "count": len(names), "names": names, "rows": rows, "pairs": _pairs(names, matrix), "hardest": []}


def _cell(count: int, total: int, right: bool, unit: str) -> dict[str, Any]:
    """`tint` grows with the square root of the share, so that a single mistake among hundreds is visible."""
    text = f"{count}" if unit == "images" else f"{100 * count / max(total, 1):.1f}"
    tint = round(100 * (count / total) ** 0.5) if total else 0
    return {"count": count if text != "0.0" else 0, "text": text, "right": right, "tint": tint}


def _recall(row: Sequence[int], index: int) -> str:
    return f"{100 * row[index] / sum(row):.1f} %" if sum(row) else "–"


def _pairs(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> list[tuple[str, str, int, str]]:
    """(truth, prediction, count, share of the truth's images), most frequent first."""
    wrong = ((count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count)
    worst = sorted(wrong, key=lambda pair: (-pair[0], pair[1], pair[2]))[:LISTED]
    return [(names[i], names[j], count, f"{100 * count / sum(matrix[i]):.1f} %") for count, i, j in worst]


def _hardest(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> list[tuple[str, str, str]]:
    """(class, right of all, recall), lowest recall first."""
    seen = [(row[i] / sum(row), i) for i, row in enumerate(matrix) if sum(row)]
    return [(names[i], f"{matrix[i][i]:,} of {sum(matrix[i]):,}", _recall(matrix[i], i)) for _, i in sorted(seen)[:LISTED]]


def pictures(folder: Path, evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The images with the highest loss: id, truth, prediction, probability, loss, and the picture as a data URI."""
    listed: Iterable[Mapping[str, Any]] = (evaluation or {}).get("mistakes") or []
    return [
        {**mistake, **picture(folder, mistake["picture"]), "probability": _percent(mistake["probability"]),
         "loss": f"{float(mistake['loss']):.3g}", "wrong": mistake["truth"] != mistake["prediction"]}
        for mistake in listed
    ]  # fmt: skip


def _percent(probability: float | None) -> str:
    """ "" where an answer has no probability: numbers, or several classes."""
    return "" if probability is None else f"{100 * probability:.1f} %"


def opened(folder: Path, name: str) -> Image.Image:
    """A picture that training wrote, not yet decoded.  ValueError or OSError: it is none, or too large.

    Only PNG, since for some formats Pillow runs other programs.
    """
    image = Image.open(inside(folder, name), formats=("PNG",))
    if image.width * image.height > MOST_PX:
        image.close()
        raise ValueError(f"{name} has {image.width} x {image.height} pixels, more than any that training leaves")
    return image


def picture(folder: Path, name: str, *, longest_px: int = PICTURE_PX, tiny_px: int = TINY_PX) -> dict[str, Any]:
    """The picture as a data URI; None where the file is missing, is no picture, or is outside of the run folder."""
    try:
        with opened(folder, name) as image:
            tiny = max(image.size) <= tiny_px
            image.thumbnail((longest_px, longest_px))
            png = io.BytesIO()
            image.save(png, "PNG")
    except (OSError, ValueError, SyntaxError):  # what Pillow raises for a damaged file
        return {"uri": None, "tiny": False}
    return {"uri": "data:image/png;base64," + base64.b64encode(png.getvalue()).decode(), "tiny": tiny}
