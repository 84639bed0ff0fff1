"""Blended windows: what MONAI makes of the same network, the same on any ranks, and how far they are from the whole image."""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn
from wide_scene import Stopped, labels_in, patched, predicted, stop_after

import widefield as wf
import widefield.cli.predict
from widefield import cli
from widefield.comm.mesh import World
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.prediction import sliding
from widefield.prediction.session import Predicted, predict_files
from widefield.prediction.sliding import SlidingWindows, blended
from widefield.prediction.wishes import Wishes
from widefield.streaming.storage.windowed_image import from_reader

pytestmark = pytest.mark.usefixtures("always_wide")


def whole_of(network: nn.Module, image: torch.Tensor, windows: SlidingWindows) -> torch.Tensor:
    """By blocks."""
    reader = from_reader(lambda window: image[window], image.shape, image.dtype)
    found = torch.zeros((1, 4, *image.shape[2:]), dtype=image.dtype)
    for block in windows.blocks(image.shape[2:]):
        found[(..., *slices(block))] = blended(network, reader, block, windows)
    return found


@pytest.mark.parametrize(
    ("size", "window", "overlap"),
    [
        ((61, 45), (20, 16), 0.0),
        ((61, 45), (20, 16), 0.5),
        ((61, 45), (20, 16), 0.8),
        ((61, 45), (64, 12), 0.25),
        ((13, 21, 18), (8, 8, 8), 0.5),
    ],
)
def test_the_whole_is_what_monai_makes(size, window, overlap, monkeypatch):
    """Its weights are float32, so 1e-5.  A window that is larger than the image would be padded there; here it is cut."""
    inferers = pytest.importorskip("monai.inferers")
    monkeypatch.setattr(sliding, "WINDOWS_IN_BLOCK", 1)
    torch.manual_seed(0)
    layer = nn.Conv2d if len(size) == 2 else nn.Conv3d
    network = nn.Sequential(layer(2, 5, 5, padding=2), nn.ReLU(), layer(5, 4, 3, padding=1)).double().requires_grad_(False)
    image = torch.randn(1, 2, *size, dtype=torch.float64)
    cut = tuple(map(min, zip(window, size, strict=True)))
    theirs = inferers.sliding_window_inference(image, cut, 1, network, overlap=overlap, mode="gaussian")
    ours = whole_of(network, image, SlidingWindows(window, overlap))
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-6)
    assert (ours - network(image)).abs().max() > 1e-3, "windows that see everything are too easy"


def test_blocks_do_not_show():
    torch.manual_seed(0)
    network, image = (
        nn.Conv2d(2, 4, 9, padding=4).double().requires_grad_(False),
        torch.randn(1, 2, 70, 50, dtype=torch.float64),
    )
    windows = SlidingWindows((16,), 0.5)
    reader = from_reader(lambda window: image[window], image.shape, image.dtype)
    all_of_it = blended(network, reader, (Interval(0, 70), Interval(0, 50)), windows)
    assert torch.equal(whole_of(network, image, windows), all_of_it)


@pytest.fixture(scope="module")
def blended_alone(run, scene, tmp_path_factory) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        return predicted(run, scene, tmp_path_factory.mktemp("blended") / "out", sliding=(32,), compare=True, outlines=True)


@pytest.mark.long
def test_the_answer_says_how_far_blended_labels_are_from_exact_ones(blended_alone, whole):
    labels, (answer,) = labels_in(blended_alone), blended_alone.answers
    others = int((labels != whole).sum())
    assert answer.apart == {"pixels": others, "share": others / whole.size} and 0 < others < whole.size / 2
    folder = Path(answer.labels).parent
    assert json.loads((folder / "predictions.json").read_text())["predictions"][0]["apart"] == answer.apart
    assert (folder / "scene.geojson").is_file() and not list((folder / ".predictions" / "exact").glob("*"))


def test_the_function_blends_as_the_command_does(run, scene, blended_alone, tmp_path):
    drawn = run / "drawn.safetensors"
    (answer,) = wf.predict(run, scene, output=tmp_path / "out", sliding=32, compare=True, weights=drawn)
    assert answer.apart == blended_alone.answers[0].apart
    with pytest.raises(ValueError, match="sliding reads files by window and writes .*, as output='answers'"):
        wf.predict(run, scene, sliding=32)


def test_the_function_has_the_options_of_the_command():
    parser = ArgumentParser()
    cli.predict.add_arguments(parser)
    named = {action.dest for action in parser._actions} - {"help", "inputs", "overrides"}
    assert set(inspect.signature(wf.predict).parameters) == named | {"images", "overrides", "model", "task"}


def _on_ranks(mesh, run: Path, scene: Path, output: Path, overrides: list[str]) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests afterwards
        patched(patch)
        patch.setattr(sliding, "WINDOWS_IN_BLOCK", 2)
        drawn, wishes = str(run / "drawn.safetensors"), Wishes(sliding=(32,), compare=True, probabilities="npy")
        return predict_files(run, [scene], overrides, mesh.world, output=output, wishes=wishes, weights=drawn)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "overrides"), [(2, ["mesh.space=[2,1]"]), (3, ["mesh.space=[1,3]"])])
def test_ranks_blend_as_one_does(run, scene, blended_alone, tmp_path, ranks, overrides):
    for found in on_ranks(ranks, _on_ranks, run, scene, tmp_path / "out", overrides):
        assert np.array_equal(labels_in(found), labels_in(blended_alone))
        assert found.answers[0].apart == blended_alone.answers[0].apart
    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        predicted(run, scene, tmp_path / "one", sliding=(32,), probabilities="npy")
    both = [np.load(tmp_path / name / "probabilities" / "scene.npy") for name in ("out", "one")]
    assert np.array_equal(*both)


def test_a_command_that_was_stopped_goes_on_where_it_was(run, scene, blended_alone, tmp_path, monkeypatch):
    monkeypatch.setattr(sliding, "WINDOWS_IN_BLOCK", 2)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            predicted(run, scene, tmp_path / "out", sliding=(32,))
    written = stop_after(monkeypatch, 100)
    assert np.array_equal(labels_in(predicted(run, scene, tmp_path / "out", sliding=(32,))), labels_in(blended_alone))
    assert written == [9 - 4]


def test_small_pictures_are_blended_too(run, scene, whole, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr("widefield.prediction.wide.WIDE_PIXELS", 2**40)
    Image.fromarray(np.load(scene)[0]).save(tmp_path / "scene.png")
    found = predicted(run, tmp_path / "scene.png", tmp_path / "out", sliding=(32,))
    assert found.answers[0].labels.endswith(".tif") and labels_in(found).shape == whole.shape


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"overlap": 1.0}, "--overlap is 1"),
        ({"compare": True}, "--compare says how far --sliding is"),
        ({"sliding": (32,), "flips": True}, "give one of them"),
    ],
)
def test_wishes_that_exclude_each_other_are_refused(wishes, words):
    with pytest.raises(ValueError, match=words):
        Wishes(**wishes)


def test_windows_of_other_dims_are_refused(run, scene, tmp_path):
    with pytest.raises(ValueError, match="--sliding has 3 sizes and this run's images have 2 dims"):
        predict_files(run, [scene], [], World(), output=tmp_path, wishes=Wishes(sliding=(8, 8, 8)))


def test_a_network_that_changes_the_size_is_refused():
    image = torch.zeros(1, 2, 20, 20)
    reader = from_reader(lambda window: image[window], image.shape)
    with pytest.raises(ValueError, match=r"the model answers for \(6, 6\) pixels of a window of \(8, 8\)"):
        blended(nn.Conv2d(2, 4, 3), reader, (Interval(0, 20), Interval(0, 20)), SlidingWindows((8,)))
