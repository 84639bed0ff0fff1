"""Fixtures of what is predicted by window; see wide_scene.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from command import RECIPES
from PIL import Image
from wide_scene import PAGE, patched, predicted

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Its last layer is drawn anew, so that labels differ from pixel to pixel."""
    folder = train(read_config(str(RECIPES / "page.yaml"), PAGE), tmp_path_factory.mktemp("run") / "run", World()).run
    weights = safetensors.torch.load_file(folder / "best.safetensors")
    torch.manual_seed(0)
    for name in [name for name, tensor in weights.items() if len(tensor.shape) and len(tensor) == 11]:
        weights[name].normal_() if name.endswith("weight") else weights[name].zero_()
    safetensors.torch.save_file(weights, folder / "drawn.safetensors")
    return folder


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
    found = predicted(run, scene, tmp_path_factory.mktemp("whole") / "out")
    assert found.answers[0].labels.endswith(".png")
    labels = np.asarray(Image.open(found.answers[0].labels))
    assert (np.diff(labels.astype(int), axis=1) != 0).mean() > 0.05, "too easy"
    return labels


@pytest.fixture
def always_wide(monkeypatch):
    patched(monkeypatch)
