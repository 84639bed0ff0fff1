"""A run of a small segmentation, a scene for it, and its labels as they are without windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from widefield.comm.mesh import World
from widefield.image_files import open_image
from widefield.prediction import wide
from widefield.prediction.session import Predicted, Wishes, predict_files

PAGE = [
    "mesh.space=[]", "data.options.size=[48,40]", "data.options.pages=[6,5]", "model.options.widths=[4,6]", "mesh.replicate=1",
    "schedule.length=2step", "schedule.warmup=1step", "log.tensorboard=false", "precision=float64",
]  # fmt: skip


def patched(monkeypatch) -> None:
    """Every image is wide, and cut into tiles of 64 pixels."""
    monkeypatch.setattr(wide, "WIDE_PIXELS", 1)
    monkeypatch.setattr(wide, "TILE", {2: 64, 3: 16})


def predicted(run: Path, scene: Path, output: Path, *overrides: str, **wishes) -> Predicted:
    drawn = str(run / "drawn.safetensors")
    return predict_files(run, [scene], list(overrides), World(), output=output, wishes=Wishes(**wishes), weights=drawn)


def labels_in(found: Predicted) -> np.ndarray:
    assert not found.lefts
    with open_image(found.answers[0].labels) as image:
        return image.read()[0]
