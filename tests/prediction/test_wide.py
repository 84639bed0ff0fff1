"""Labels of images that are read and written by window: those of the whole image, on any ranks, whatever stops the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import RECIPES

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.image_files import open_image
from widefield.prediction import wide
from widefield.prediction.session import Predicted, Wishes, predict_files
from widefield.run import train

PAGE = [
    "mesh.space=[]", "data.options.size=[48,40]", "data.options.pages=[6,5]", "model.options.widths=[4,6]", "mesh.replicate=1",
    "schedule.length=2step", "schedule.warmup=1step", "log.tensorboard=false", "precision=float64",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(read_config(str(RECIPES / "page.yaml"), PAGE), tmp_path_factory.mktemp("run") / "run", World()).run


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    """A page of 150 x 170 pixels."""
    path = tmp_path_factory.mktemp("scene") / "scene.npy"
    settings = [*PAGE[:1], "data.options.size=[150,170]", *PAGE[2:]]
    np.save(path, open_dataset(read_config(str(RECIPES / "page.yaml"), settings).data).evaluate.read(0)[0].numpy())
    return path


@pytest.fixture(scope="module")
def whole(run, scene, tmp_path_factory) -> np.ndarray:
    """The labels as they are without windows."""
    found = predict_files(run, [scene], [], World(), output=tmp_path_factory.mktemp("whole") / "out")
    from PIL import Image

    return np.asarray(Image.open(found.answers[0].labels))


@pytest.fixture(autouse=True)
def always_wide(monkeypatch):
    monkeypatch.setattr(wide, "WIDE_PIXELS", 1)
    monkeypatch.setattr(wide, "TILE", 64)


def predicted(run: Path, scene: Path, output: Path, *overrides: str, **wishes) -> Predicted:
    return predict_files(run, [scene], list(overrides), World(), output=output, wishes=Wishes(**wishes))


def labels_in(found: Predicted) -> np.ndarray:
    assert not found.lefts
    with open_image(found.answers[0].labels) as image:
        return image.read()[0]


@pytest.mark.parametrize("overrides", [[], ["stream.tiles=[2,3]"], ["stream.tiles=[1,1]"], ["stream.memory=32MiB"]])
def test_labels_by_window_are_those_of_the_whole(run, scene, whole, tmp_path, overrides):
    found = predicted(run, scene, tmp_path / "out", *overrides)
    assert np.array_equal(labels_in(found), whole)
