"""Labels of images that are read and written by window: those of the whole image, on any ranks, whatever stops the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks
from wide_scene import Stopped, labels_in, patched, predicted, reason, stop_after

from widefield.prediction import wide, wide_source
from widefield.prediction.raw_labels import RawLabels
from widefield.prediction.session import Predicted, predict_files

pytestmark = pytest.mark.usefixtures("always_wide")


@pytest.mark.parametrize("overrides", [[], ["stream.tiles=[2,3]"], ["stream.tiles=[1,1]"], ["stream.memory=32MiB"]])
def test_labels_by_window_are_those_of_the_whole(run, scene, whole, tmp_path, overrides):
    found = predicted(run, scene, tmp_path / "out", *overrides)
    assert np.array_equal(labels_in(found), whole)


def test_shares_of_classes_are_those_of_the_whole(run, scene, whole, tmp_path):
    (answer,) = predicted(run, scene, tmp_path / "out").answers
    counts = np.bincount(whole.ravel(), minlength=11) / whole.size
    classes = [str(name) for name in json.loads((tmp_path / "out" / "predictions.json").read_text())["classes"]]
    found = dict(zip(answer.classes, answer.probabilities, strict=True))
    assert answer.probabilities == sorted(answer.probabilities, reverse=True)
    assert all(found[name] == pytest.approx(counts[classes.index(name)]) for name in answer.classes)


def _on_ranks(mesh, run: Path, scenes: list[Path], output: Path, overrides: list[str]) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests afterwards
        patched(patch)
        return predict_files(run, scenes, overrides, mesh.world, output=output, weights=str(run / "drawn.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["mesh.space=[2,1]"]),
        (3, ["mesh.space=[1,3]"]),
        (2, ["mesh.replicate=2"]),
        (4, ["mesh.replicate=2", "mesh.space=[2,1]"]),
    ],
)
def test_ranks_write_the_labels_of_one(run, scene, whole, tmp_path, ranks, overrides):
    other = tmp_path / "other.npy"
    np.save(other, np.load(scene)[..., ::-1])
    for found in on_ranks(ranks, _on_ranks, run, [scene, other], tmp_path / "out", overrides):
        assert not found.lefts and [answer.path for answer in found.answers] == [str(scene), str(other)]
        assert np.array_equal(labels_in(found), whole)
    assert not list((tmp_path / "out" / ".predictions" / "wide").glob("*"))


@pytest.mark.long
def test_a_command_that_was_stopped_goes_on_where_it_was(run, scene, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            predicted(run, scene, tmp_path / "out")
    assert not list((tmp_path / "out").glob("scene*"))
    (place,) = (tmp_path / "out" / ".predictions" / "wide").iterdir()
    with (place / "windows_0.jsonl").open("a") as file:
        file.write("[64, 1")  # as a kill leaves it
    written = stop_after(monkeypatch, 100)
    assert np.array_equal(labels_in(predicted(run, scene, tmp_path / "out")), whole)
    assert written == [9 - 4]


@pytest.mark.long
@pytest.mark.parametrize("change", ["the image", "the tiles", "the file of labels"])
def test_what_was_written_for_something_else_is_thrown_away(run, scene, whole, tmp_path, monkeypatch, change):
    copy, overrides = tmp_path / "copy.npy", []
    np.save(copy, np.load(scene)[..., ::-1] if change == "the image" else np.load(scene))
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            predicted(run, copy, tmp_path / "out")
    (place,) = (tmp_path / "out" / ".predictions" / "wide").iterdir()
    if change == "the image":
        np.save(copy, np.load(scene))
    elif change == "the tiles":
        monkeypatch.setattr(wide, "TILE", {2: 40})
    else:
        (place / "labels.raw").write_bytes(b"")
    written = stop_after(monkeypatch, 100)
    assert np.array_equal(labels_in(predicted(run, copy, tmp_path / "out", *overrides)), whole)
    assert written == [20 if change == "the tiles" else 9]


@pytest.mark.long
def test_done_is_done(run, scene, tmp_path, monkeypatch):
    first = predicted(run, scene, tmp_path / "out")
    written = stop_after(monkeypatch, 0)
    again = predicted(run, scene, tmp_path / "out")
    assert again.earlier == 1 and again.answers == first.answers and written == [0]


def test_a_full_disk_is_told_before_anything_is_computed(run, scene, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    written = stop_after(monkeypatch, 0)
    assert "25 KiB are needed for the labels and 10 KiB are free" in reason(run, scene, tmp_path / "out")
    assert written == [0]


def test_a_disk_that_refuses_a_window_is_told(run, scene, tmp_path, monkeypatch):
    def full(self, window, labels):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RawLabels, "write", full)
    assert "No space left on device" in reason(run, scene, tmp_path / "out")


def test_what_is_not_done_by_window_is_refused(run, scene, tmp_path):
    resized = "data.read_evaluate=[{Resize: {size: [64, 64]}}]"
    assert "data.read_evaluate has Resize" in reason(run, scene, tmp_path / "out", resized)


def test_a_file_that_is_damaged_meanwhile_is_named(run, scene, tmp_path, monkeypatch):
    copy = tmp_path / "scene.npy"
    shutil.copy(scene, copy)
    read = wide_source.read_image

    def damaged(path, *given, **more):
        copy.write_bytes(b"\x93NUMPY")
        return read(path, *given, **more)

    monkeypatch.setattr(wide_source, "read_image", damaged)
    assert str(copy) in reason(run, copy, tmp_path / "out")
