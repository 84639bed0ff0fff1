"""Two runs of one recipe under two plans: are losses of 20 steps, weights and what was evaluated those of one rank?"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from command import losses
from safetensors.torch import load_file


def evaluation(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def numbers(column: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in column]


def check_same_numbers(folder: Path, other: Path) -> None:
    """folder: of 20 steps in float64 on one rank."""
    assert len(losses(folder)) == len(set(losses(folder))) == 20
    assert losses(other) == pytest.approx(losses(folder), rel=1e-8, abs=0)
    ours, theirs = (load_file(one / "weights.safetensors") for one in (folder, other))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-6, atol=1e-9)  # 20 steps amplify rounding of 1e-16
    one, two = evaluation(folder), evaluation(other)
    assert two["confusion"] == one["confusion"] and two["images"] == one["images"] == one["of"]
    assert list(two["columns"]) == list(one["columns"])
    for name, column in one["columns"].items():
        assert numbers(two["columns"][name]) == pytest.approx(numbers(column), rel=1e-9, nan_ok=True)
