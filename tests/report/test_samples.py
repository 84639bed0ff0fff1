"""Does the report show every pixel's class as it was answered, the scores that follow, and the plan's cuts where they are?"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from widefield.comm.mesh import Mesh, World
from widefield.data.image import colours, write_image, write_labels
from widefield.geometry.layout import Grid
from widefield.plans import Plan
from widefield.report import write_report
from widefield.report.samples import cuts, legend, samples
from widefield.tiled.api import window

START = {
    "kind": "start", "time": 1_767_225_600.0, "ranks": 1, "resumed_from": None, "versions": {"torch": "2.15.0"},
    "machine": {"host": "node-17", "cpu": "Xeon 8481C", "cores": 2, "memory_bytes": 16 * 2**30, "gpus": []},
    "reasons": [], "steps": 4, "samples_per_epoch": 128, "parameters": 77018,
}  # fmt: skip
CLASSES = ["paper", "cat", "dog", "emu"]
CONFUSION = [[90, 6, 4, 0], [10, 30, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
IMAGE = torch.arange(48, dtype=torch.uint8).view(1, 6, 8)
TRUTH = torch.zeros(6, 8, dtype=torch.int64)
TRUTH[1:3, 2:5], TRUTH[4, 4:], TRUTH[5, 0] = 1, 2, 255
ANSWER = TRUTH.clone()
ANSWER[2, 2], ANSWER[5, 0] = 0, 1  # one pixel wrong, one that does not count


def run_of_pixels(folder: Path, *, space: str = "[]") -> Path:
    """A run folder with one picture of 6 x 8 pixels, of an image of 600 x 800."""
    (folder / "samples").mkdir(parents=True)
    write_image(IMAGE, folder / "samples/00_image.png")
    write_labels(TRUTH, folder / "samples/00_truth.png")
    write_labels(ANSWER, folder / "samples/00_prediction.png")
    files = {kind: f"samples/00_{kind}.png" for kind in ("image", "truth", "prediction")}
    sample = {"id": "page/evaluate/0", "size": [600, 800], "right": 4699, "counted": 4700, **files}
    told = {
        "step": 4, "sentence": "57.00 % mean IoU on 7/8 images", "images": 7, "of": 8, "duplicates": 0,
        "skipped": [], "loss": 0.0612, "metrics": {"iou": 57.0, "dice": 66.6, "accuracy": 85.71},
        "unit": "pixels", "classes": CLASSES, "confusion": CONFUSION, "mistakes": [], "samples": [sample],
    }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(told))
    (folder / "record.jsonl").write_text(json.dumps(START | {"plan": f"replicate: 1\nspace: {space}\n"}) + "\n")
    return folder


def page(folder: Path) -> str:
    return write_report(folder).read_text()


def text_of(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split()))


def evaluation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


# ---------------------------------------------------------------------------------------------- pictures


def test_panes_show_image_truth_prediction_and_errors_pixel_by_pixel(tmp_path):
    folder = run_of_pixels(tmp_path / "run")
    (sample,) = samples(folder, evaluation(folder), [])
    shown = {name: None if uri is None else pixels(uri) for name, _, uri in sample["panes"]}
    assert list(shown) == ["image", "truth", "prediction", "errors"]
    assert np.array_equal(pixels(sample["page"]), IMAGE[0].numpy())
    for name, labels in (("truth", TRUTH), ("prediction", ANSWER)):
        for y in range(6):
            for x in range(8):
                number = int(labels[y, x])
                clear = number in (0, 255)  # class 0, and what does not count
                assert tuple(shown[name][y, x]) == ((0, 0, 0, 0) if clear else (*colours(4)[number], 255))
    assert np.argwhere(shown["errors"][:, :, 3]).tolist() == [[2, 2]], "the pixel that does not count is no error"
    assert sample["caption"] == "600 x 800 px, 99.98 % of 4,700 counted pixels right"


@pytest.mark.parametrize("kind", ["image", "truth", "prediction"])
def test_a_sample_whose_file_is_gone_or_damaged_or_elsewhere_is_left_out(tmp_path, kind):
    folder = run_of_pixels(tmp_path / "run")
    told = evaluation(folder)
    outside = json.loads(json.dumps(told))
    outside["samples"][0][kind] = "../elsewhere.png"
    Image.new("L", (8, 6)).save(tmp_path / "elsewhere.png")
    assert samples(folder, outside, []) == []
    (folder / f"samples/00_{kind}.png").write_bytes(b"no picture")
    assert samples(folder, told, []) == []
    (folder / f"samples/00_{kind}.png").unlink()
    assert samples(folder, told, []) == [] and "Every class" in page(folder)


@pytest.mark.parametrize("evaluation", [None, {"classes": ["a"]}])
def test_without_samples_there_are_none(tmp_path, evaluation):
    assert samples(tmp_path, evaluation, []) == [] and legend(evaluation) == []


# ---------------------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize(("space", "rows", "columns"), [
    ([], [], []),
    ([1, 1], [], []),
    ([2], [("50.667", "304")], []),
    ([2, 1], [("50.667", "304")], []),
    ([1, 2], [], [("50.000", "400")]),
    ([3, 2], [("33.333", "200"), ("66.667", "400")], [("50.000", "400")]),
])  # fmt: skip
def test_cuts_are_those_of_the_plan(space, rows, columns):
    assert cuts([600, 800], space) == (rows, columns)


def test_cuts_are_where_the_tiles_are():
    """Where the engine cuts: every tile but the first ones begins at a line."""
    rows, columns = cuts([1001, 1000], [4, 3])
    meshes = [Mesh(Plan(space=[4, 3]), World(rank, 12), torch.device("cpu"), grid=Grid((4, 3), rank)) for rank in range(12)]
    starts = [[part.start for part in window((1001, 1000), mesh)] for mesh in meshes]
    assert [int(first.replace(",", "")) for _, first in rows] == sorted({row for row, _ in starts} - {0})
    assert [int(first.replace(",", "")) for _, first in columns] == sorted({column for _, column in starts} - {0})
    assert float(rows[0][0]) == pytest.approx(100 * 256 / 1001, abs=1e-3)


def test_tiles_that_hold_nothing_draw_no_line_at_the_edge():
    assert cuts([2, 5], [4, 1]) == ([("50.000", "1")], [])


def test_the_page_draws_cuts_over_every_pane_and_names_them_once(tmp_path):
    shown = page(run_of_pixels(tmp_path / "cut", space="[2, 2]"))
    assert shown.count('class="cut row" style="top: 50.667%"') == shown.count('class="cut column" style="left: 50.000%"') == 4
    text = text_of(shown)
    assert text.count("row 304") == text.count("column 400") == 1 and "the plan's cuts" in text
    assert "space 2 x 2 space" in text, "the plan's table"
    whole = page(run_of_pixels(tmp_path / "whole"))
    assert 'class="cut' not in whole and "the plan's cuts" not in text_of(whole)


# ---------------------------------------------------------------------------------------------- figures


def test_every_class_has_its_iou_and_dice_by_hand():
    rows = legend({"unit": "pixels", "classes": CLASSES, "confusion": CONFUSION})
    assert [(row["name"], row["pixels"], row["iou"], row["dice"]) for row in rows] == [
        ("paper", "100", "81.82 %", "90.00 %"),  # 90 of 110, 180 of 200
        ("cat", "40", "65.22 %", "78.95 %"),  # 30 of 46, 60 of 76
        ("dog", "0", "0.00 %", "0.00 %"),  # answered, but nowhere true
        ("emu", "0", "–", "–"),
    ]
    assert len({row["colour"] for row in rows}) == 4


def test_a_run_of_pixels_says_what_it_counts(tmp_path):
    shown = page(run_of_pixels(tmp_path / "run"))
    text = text_of(shown)
    for words in (
        "mean IoU 57.00 % 120 of 140 pixels right; 7/8 images",
        "Confusion matrix Rows are the truth, columns the prediction, in percent of the row's pixels.",
        "paper 90.0 6.0 4.0 90.0 %", "cat 25.0 75.0 75.0 %",
        "Every class class pixels of the truth IoU Dice paper 100 81.82 % 90.00 %",
        "Evaluated images The first ones of the evaluation split. Paper lets the image through, darkened; errors are red.",
        "page/evaluate/0: 600 x 800 px, 99.98 % of 4,700 counted pixels right",
    ):  # fmt: skip
        assert words in text, words
    assert all(address.startswith("data:image/png;base64,") for address in re.findall(r' src="(.*?)"', shown))
    assert not re.search(r"url\((?!data:)", shown), "the page loads something"


def test_text_from_outside_is_never_markup(tmp_path):
    folder, bad = run_of_pixels(tmp_path / "run"), """"'><script>alert(1)</script><img src=x onerror=y>"""
    told = evaluation(folder)
    told["samples"][0]["id"] = told["sentence"] = bad
    told |= {"classes": [bad] * 4, "skipped": [bad]}
    (folder / "evaluation.json").write_text(json.dumps(told))
    shown = page(folder)
    assert shown.count("&lt;script&gt;alert(1)") >= 10 and "<script" not in shown and "src=x onerror=y>" not in shown


@pytest.mark.parametrize("change", [{"size": ["a", 3]}, {"size": 7}, {"right": None}, {"counted": "x"}])
def test_a_sample_that_somebody_made_up_is_refused(tmp_path, change):
    folder = run_of_pixels(tmp_path / "run", space="[2, 1]")
    told = evaluation(folder)
    told["samples"][0] |= change
    (folder / "evaluation.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="holds values that widefield does not write"):
        write_report(folder)


def test_more_cuts_and_stages_than_anybody_draws_are_left_out(tmp_path):
    folder = run_of_pixels(tmp_path / "run", space="[1000000000, 1]")
    line = START | {"plan": "stage: 9999\nspace: [1000000000, 1]\n", "reasons": ["pipeline.micro_batches=99999999"]}
    (folder / "record.jsonl").write_text(json.dumps(line) + "\n")
    assert 'class="cut' not in page(folder)


def test_a_picture_of_more_pixels_than_ours_is_left_out(tmp_path, monkeypatch):
    folder = run_of_pixels(tmp_path / "run")
    assert 'class="sample"' in page(folder)
    monkeypatch.setattr("widefield.report.mistakes.MOST_PX", 47)
    assert 'class="sample"' not in page(folder)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(("top", "mode"), [(255, "P"), (256, "I;16")])
def test_labels_in_a_file_are_the_class_numbers(tmp_path, top, mode):
    labels = torch.tensor([[0, 1, 2], [7, 100, top]])
    write_labels(labels, tmp_path / "labels.png")
    with Image.open(tmp_path / "labels.png") as image:
        assert image.mode == mode and np.asarray(image).tolist() == labels.tolist()
        if mode == "P":
            assert image.convert("RGB").getpixel((1, 0)) == colours(2)[1]


def test_a_negative_label_is_the_files_last():
    assert torch.tensor([-1]).to(torch.uint8).item() == 255


def test_classes_have_colours_of_their_own():
    assert len(set(colours(60))) == 60 and colours(60)[:3] == colours(3)
