"""`widefield view`: which files are meant, in what order of trust, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import RECIPES, run
from PIL import Image
from viewer.pages import data, level

from widefield.cli import main
from widefield.prediction.table import write_tables
from widefield.viewer.sources import predicted_sources, stem_of

RNG = np.random.default_rng(2)
PIXELS = RNG.integers(0, 256, (2, 60, 70), dtype=np.uint8)
TRUTH = RNG.integers(0, 3, (2, 60, 70)).astype(np.uint8)
PREDICTION = np.where(RNG.random(TRUTH.shape) < 0.2, (TRUTH + 1) % 3, TRUTH).astype(np.uint8)
CLASSES = ["field", "road", "water"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Two images below scans/, what a run with mesh.space=[2, 1] predicted for them in answers/, the truth in masks/."""
    done = []
    for number, name in enumerate(("a/one", "two")):
        for folder, pixels, ending in (("scans", PIXELS, ""), ("answers", PREDICTION, ""), ("masks", TRUTH, "_mask")):
            path = tmp_path / folder / f"{name}{ending}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[number]).save(path)
        answer = {"classes": CLASSES, "probabilities": [0.5, 0.3, 0.2], "labels": f"answers/{name}.png"}
        done.append({"input": f"scans/{name}.png", "answer": answer})
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.yaml").write_text("mesh: {space: [2, 1]}\n")
    write_tables(tmp_path / "answers", done, {"run": "runs/x"}, labels="pixels", classes=CLASSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *words: str, status: int = 0) -> str:
    try:
        assert main(["view", *words]) == status
    except SystemExit as ended:
        assert ended.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_a_folder_of_predictions_is_shown_with_the_truth(project, capsys):
    lines = said(capsys, "answers", "--labels", "truth=masks").splitlines()
    wrong = (PREDICTION != TRUTH).sum((1, 2))
    assert lines[0].startswith("2 images, at most 8 tiles and about ")
    assert lines[1] == f"a/one: {wrong[0]:,} of 4,200 compared pixels differ, {100 * wrong[0] / 4200:.2f} %"
    assert lines[3].startswith("8 tiles, ") and lines[3].endswith(": answers/viewer/index.html")
    page = project / "answers" / "viewer"
    scenes = data(page)["scenes"]
    assert [scene["name"] for scene in scenes] == ["a/one", "two"]
    assert [one["name"] for one in scenes[1]["legend"]] == CLASSES and scenes[1]["cuts"] == [[], [30], []]
    for number in range(2):
        for name, pixels in (("image", PIXELS), ("prediction", PREDICTION + 1), ("truth", TRUTH + 1)):
            assert np.array_equal(level(page, name, 0, (60, 70), scene=number), pixels[number])
        assert (page / f"overview-{number}.png").is_file()


def test_the_folder_of_the_run_will_do_too_and_may_have_moved(project, capsys):
    (project / "runs" / "x" / "predictions").parent.mkdir(exist_ok=True)
    (project / "answers").rename(project / "runs" / "x" / "predictions")
    said(capsys, "runs/x", "--first", "1")
    scenes = data(project / "runs" / "x" / "predictions" / "viewer")["scenes"]
    assert [(scene["name"], scene["layers"]) for scene in scenes] == [("a/one", ["image", "prediction"])]


def test_images_are_named_with_their_labels(project, capsys):
    labels = ["--labels", "prediction=answers/two.png", "--labels", "truth=masks/two_mask.png"]
    said(capsys, "scans/two.png", *labels, "--output", "page")
    (scene,) = data(project / "page")["scenes"]
    assert scene["wrong"] == (PREDICTION[1] != TRUTH[1]).sum() and scene["cuts"] == [[], [30], []]
    assert [one["name"] for one in scene["legend"]] == CLASSES  # from predictions.json beside the prediction
    said(capsys, "scans/two.png", *labels, "--classes", "x,y,z", "--space", "1x2", "--output", "page")
    (scene,) = data(project / "page")["scenes"]
    assert [one["name"] for one in scene["legend"]] == ["x", "y", "z"] and scene["cuts"] == [[], [], [36]]


def test_one_of_several_images_in_a_file_is_named_with_it(project, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(project / "scan.h5", "w") as file:
        file["raw/left"], file["raw/right"], file["labels"] = PIXELS[0], PIXELS[1], TRUTH[1]
    said(capsys, "scan.h5#/raw/right", "--labels", "truth=scan.h5#/labels", "--output", "page")
    assert data(project / "page")["scenes"][0]["name"] == "scan.h5#/raw/right"
    for name, pixels in (("image", PIXELS[1]), ("truth", TRUTH[1] + 1)):
        assert np.array_equal(level(project / "page", name, 0, (60, 70)), pixels)


def test_a_folder_of_images_has_labels_by_stem(project, capsys):
    said(capsys, "scans", "--labels", "truth=masks", "--output", "page")
    assert [scene["name"] for scene in data(project / "page")["scenes"]] == ["a/one", "two"]
    assert np.array_equal(level(project / "page", "truth", 0, (60, 70), scene=1), TRUTH[1] + 1)


def test_probabilities_of_a_prediction_are_found(project, capsys):
    likely = RNG.dirichlet([1, 1, 1], (60, 70)).transpose(2, 0, 1).astype(np.float16)
    (project / "answers" / "probabilities").mkdir()
    np.save(project / "answers" / "probabilities" / "two.npy", likely)
    said(capsys, "answers")
    one, two = (scene["layers"] for scene in data(project / "answers" / "viewer")["scenes"])
    assert one == ["image", "prediction"] and two == [*one, "probability-0", "probability-1", "probability-2"]
    shown = level(project / "answers" / "viewer", "probability-2", 0, (60, 70), scene=1)
    assert np.array_equal(shown, np.floor(255 * likely[2].astype(float) + 0.5))


def changed(folder: Path, **keys) -> None:
    path = folder / "predictions.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def row(**keys) -> dict:
    return {"predictions": [{"input": "scans/two.png", "labels": "answers/two.png", **keys}]}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"labels": "class"}, "predictions.json has no labels of pixels, one class each, and these are what is shown"),
        ({"predictions": {}}, "predictions.json has no list of predictions, as `widefield predict` writes it"),
        (row(input="gone.png"), "names the image gone.png, and there is none, seen from here; stand where it was predicted"),
        (row(labels="answers/gone.png"), "names the labels answers/gone.png, which answers has not; predict again"),
        (row(labels="/"), "names the labels /, which answers has not"),
    ],
)
def test_tables_that_do_not_fit_are_refused(project, capsys, keys, words):
    changed(project / "answers", **keys)
    assert words in said(capsys, "answers", status=2)
    assert not (project / "answers" / "viewer").exists()


def test_a_table_cannot_name_labels_outside_of_its_folder(project):
    (project / "answers" / "out").symlink_to(project / "masks")
    changed(project / "answers", **row(labels="out/two_mask.png"))
    with pytest.raises(ValueError, match="is a link out of answers"):
        predicted_sources(Path("answers"), {})
    changed(project / "answers", **row(labels="../masks/two_mask.png"))
    with pytest.raises(ValueError, match="names the labels ../masks/two_mask.png, which answers has not"):
        predicted_sources(Path("answers"), {})


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 100_000])
def test_a_damaged_table_is_said_in_words(project, capsys, text):
    (project / "answers" / "predictions.json").write_text(text)
    assert "predict again" in said(capsys, "answers", status=2)


CODE = "mesh: {space: !!python/name:os.system }"


@pytest.mark.parametrize("config", ["", "mesh: 3", "mesh: {space: [0]}", "mesh: {space: [x]}", "{", CODE])
def test_a_run_without_a_cut_has_none(project, capsys, config):
    (project / "runs" / "x" / "config.yaml").write_text(config)
    said(capsys, "answers", "--first", "1")
    assert data(project / "answers" / "viewer")["scenes"][0]["cuts"] == [[], [], []]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.tif"], "nowhere.tif: there is no such file or folder"),
        (["scans/two.png", "nowhere.tif"], "nowhere.tif is left out: there is no such file or folder; mend the name"),
        (["answers", "scans"], "answers is a folder of predictions, and scans is named too; give a command for each"),
        (["scans", "--labels", "error=masks"], "--labels error=... is neither prediction nor truth; write one of these"),
        (["scans", "--labels", "truth=masks/two_mask.png"], "is one file and there are 2 images; name a folder in which"),
        (["scans", "--probabilities", "x.npy"], "--probabilities x.npy is one file and there are 2 images; name one of them"),
        (["scans", "--labels", "truth=runs"], "--labels truth=runs has no file for any of the images, as one.png for one"),
        (["answers", "--labels", "truth=runs"], "--labels truth=runs has no file for any of the images"),
        (["scans/two.png", "--labels", "truth=gone.png"], "gone.png"),
        (["answers", "--output", "scans"], "scans is there and is no viewer, so it is not replaced"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(project, capsys, words, told):
    assert told in said(capsys, *words, status=2)


def test_two_files_of_one_stem_are_refused(project, capsys):
    Image.fromarray(TRUTH[1]).save(project / "masks" / "two.png")
    told = said(capsys, "scans", "--labels", "truth=masks", status=2)
    assert "masks/two.png and masks/two_mask.png may both be the labels of two; leave one of them there" in told


def test_stems_have_no_suffix_of_two_parts():
    names = ("a.tif", "case.nii.gz", "b.c.ome.zarr", "scan.jpg.png", "plain")
    assert [stem_of(Path(name)) for name in names] == ["a", "case", "b.c.ome", "scan.jpg", "plain"]


@pytest.mark.long
def test_what_a_run_predicts_is_shown(tmp_path):
    """By the commands as a user gives them: the folder is what `predict` writes."""
    short = [
        "data.options={pages: [8, 2], size: [96, 96]}",
        "schedule.length=1ep",
        "schedule.warmup=0ep",
        "schedule.name=constant",
    ]
    run("train", RECIPES / "page.yaml", "--run", tmp_path / "run", "mesh.space=[2,1]", *short)
    Image.fromarray(RNG.integers(0, 256, (70, 90), dtype=np.uint8)).save(tmp_path / "scan.png")
    run("predict", tmp_path / "run", tmp_path / "scan.png", "--probabilities")
    assert "1 image, at most 13 tiles" in run("view", tmp_path / "run")
    page = tmp_path / "run" / "predictions" / "viewer"
    (scene,) = data(page)["scenes"]
    assert len(scene["layers"]) == 2 + 11 and scene["cuts"] == [[], [36], []]
    with Image.open(tmp_path / "run" / "predictions" / "scan.png") as labels:
        assert np.array_equal(level(page, "prediction", 0, (70, 90)), np.asarray(labels).astype(int) + 1)
