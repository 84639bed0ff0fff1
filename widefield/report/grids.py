"""Grids of what a generator made of the same noise at each evaluation, beside as many real images.

All of them are shown up to MOST; of more the first, the last, and some between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widefield.report.mistakes import picture
from widefield.training.record import Line
from widefield.training.sample_grid import REAL, made_file

MOST = 7
"""The last one is large, and the others are smaller, in rows of three."""
LARGE_PX, SMALL_PX = 900, 450
TINY_PX = 300
"""Grids up to this long are enlarged pixel by pixel."""


def grids(folder: Path, evaluation: Mapping[str, Any] | None, evaluations: Sequence[Line]) -> dict[str, Any] | None:
    """`pair`: the real images and the newest grid.  `earlier`: grids of evaluations before.  None where no file is left."""
    is_made = isinstance((evaluation or {}).get("grid"), Mapping)
    steps = sorted({int(line["step"]) for line in evaluations}) if is_made else []
    there = _some([step for step in steps if (folder / made_file(step)).is_file()])
    if not there:
        return None
    pair = [
        _grid(folder, REAL, "real images", LARGE_PX),
        _grid(folder, made_file(there[-1]), f"made, step {there[-1]:,}", LARGE_PX),
    ]
    earlier = [_grid(folder, made_file(step), f"step {step:,}", SMALL_PX) for step in there[:-1]]
    return {"pair": [one for one in pair if one["uri"]], "earlier": [one for one in earlier if one["uri"]]}


def _some(steps: list[int]) -> list[int]:
    """At most MOST, the first and the last among them, evenly."""
    if len(steps) <= MOST:
        return steps
    return [steps[round(number * (len(steps) - 1) / (MOST - 1))] for number in range(MOST)]


def _grid(folder: Path, name: str, title: str, longest_px: int) -> dict[str, Any]:
    return {"title": title, **picture(folder, name, longest_px=longest_px, tiny_px=TINY_PX)}
