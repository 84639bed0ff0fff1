"""The recipe of detection, end to end on one rank, at a size of its own: trained, resumed, evaluated, predicted to files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import losses, record
from small_recipe import SmallRecipe, check_evaluated_again

import widefield as wf
from widefield.cli import main
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.data.image import read_image, write_image

SMALL = ["mesh.space=[]", "data.options.size=[96, 80]", "data.options.pages=[6, 5]", "schedule.length=4step",
         "data.batch_size=2", "model.options.width=8", "schedule.warmup=2step", "evaluate.every=1000step",
         "log.tensorboard=false",
         "task.options.score=0.002"]  # fmt: skip


RECIPE = SmallRecipe("page_detection", SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return RECIPE.trained(tmp_path_factory.mktemp("detection") / "run")


def page_of(run: Path, number: int):
    """A page of the evaluation split and its boxes."""
    return open_dataset(read_config(str(run / "config.yaml")).data).evaluate.read(number)


def test_the_recipe_cuts_each_page_over_two_ranks():
    RECIPE.check_space_of_two_ranks()


def test_every_held_out_page_is_evaluated(trained):
    (line,) = record(trained, "evaluation")
    assert (line["images"], line["of"], line["duplicates"]) == (5, 5, 0)
    assert list(line["metrics"])[:3] == ["map", "map50", "map75"] and len(losses(trained)) == 4
    told = json.loads((trained / "evaluation.json").read_text())
    assert told["labels"] == "boxes" and re.match(r"mAP \d+\.\d %, mAP50 \d+\.\d %.* on 5/5 images", told["sentence"])
    boxes = sum(len(page_of(trained, number)[1]) for number in range(5))
    assert sum(told["columns"]["boxes"]) == boxes > 5 and told["gathered"] == ["coco"]
    table = (trained / "evaluation.csv").read_text().splitlines()
    assert table[0] == "class,boxes,ap" and len(table) == 12 and table[-1].startswith(f"mean,{boxes},")
    assert (trained / "report.html").is_file()


def test_the_worst_pages_are_shown_with_their_boxes(trained):
    """Every page is among the worst of 24; its digits have green frames where the truth has boxes."""
    told = json.loads((trained / "evaluation.json").read_text())["mistakes"]
    assert sorted(one["id"] for one in told) == [f"page/evaluate/{number}" for number in range(5)]
    assert [one["loss"] for one in told] == sorted((one["loss"] for one in told), reverse=True)
    for one in told:
        _, rows = page_of(trained, int(one["id"].rpartition("/")[2]))
        shown = read_image(trained / one["picture"]).long()
        for x1, y1, x2, y2, *_ in rows.long().tolist():
            for y, x in ((y1, x1), (y2 - 1, x2 - 1), (y1, x2 - 1)):
                assert shown[:, y, x].tolist() == [60, 200, 90]
        assert sum(int(word.partition(" x ")[0]) if " x " in word else 1 for word in one["truth"].split(", ")) == len(
            rows
        ) or not len(rows)
    assert "page/evaluate/0" in (trained / "report.html").read_text()


@pytest.mark.long
def test_a_resumed_run_equals_one_that_was_not_stopped(trained, tmp_path):
    RECIPE.check_resume(trained, tmp_path / "cut", after=2)


def test_the_evaluation_can_be_had_again(trained):
    check_evaluated_again(trained)


def test_a_prediction_is_cocos_results_and_geojson(trained, tmp_path, capsys):
    image, _ = page_of(trained, 2)
    write_image(image, tmp_path / "0042.png")
    write_image(page_of(trained, 3)[0], tmp_path / "scan.png")
    files, answers = [str(tmp_path / name) for name in ("0042.png", "scan.png")], tmp_path / "answers"
    assert main(["predict", str(trained), *files, "--output", str(answers)]) == 0
    assert "2 answered" in capsys.readouterr().out
    names = sorted(path.name for path in answers.iterdir() if not path.name.startswith("."))
    assert names == ["0042.geojson", "coco_results.json", "predictions.csv", "predictions.json", "scan.geojson"]
    results = json.loads((answers / "coco_results.json").read_text())
    (answer,) = wf.predict(trained, [image])
    own = [one for one in results if one["image_id"] == 42]
    assert len(own) == len(answer.boxes) > 3 and {one["image_id"] for one in results} <= {42, "scan"}
    for one, box, name, score in zip(own, answer.boxes, answer.classes, answer.probabilities, strict=True):
        x, y, width, height = one["bbox"]
        assert [x, y, x + width, y + height] == pytest.approx(box, abs=1e-4)
        assert (one["category_name"], one["category_id"], one["score"]) == (name, int(name), pytest.approx(score))
    features = json.loads((answers / "0042.geojson").read_text())["features"]
    assert len(features) == len(own) and features[0]["properties"]["score"] == pytest.approx(own[0]["score"])
    x1, y1, x2, y2 = answer.boxes[0]
    ring = [[x1, y1], [x2, y1], [x2, y2], [x1, y2], [x1, y1]]
    assert torch.allclose(torch.tensor(features[0]["geometry"]["coordinates"][0]), torch.tensor(ring), atol=1e-3)
    table = (answers / "predictions.csv").read_text().splitlines()
    assert table[0] == "input,boxes,file," + ",".join("0123456789") and f",{len(own)}," in table[1]
    again = main(["predict", str(trained), *files, "--output", str(answers)])
    assert again == 0 and "2 of them by an earlier command" in capsys.readouterr().out
    assert json.loads((answers / "coco_results.json").read_text()) == results


def test_boxes_are_those_of_the_image_as_it_is_where_evaluation_resizes(trained, tmp_path):
    """The model sees twice the pixels; boxes come back in pixels of the file."""
    image, _ = page_of(trained, 2)
    larger = torch.nn.functional.interpolate(image[None].float(), scale_factor=2, mode="nearest")[0].to(torch.uint8)
    RECIPE.go(
        tmp_path / "run", "data.read_evaluate=[{Resize: {size: [96, 80], interpolation: nearest}}]", "data.options.pages=[6, 1]"
    )
    (plain,), (resized,) = (wf.predict(tmp_path / "run", [one]) for one in (image, larger))
    assert len(plain.boxes) > 3
    assert torch.allclose(2 * torch.tensor(plain.boxes), torch.tensor(resized.boxes), atol=1e-3)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--flips", "--flips takes the mean over mirror images, and boxes of several have none"),
        ("--outlines", "--outlines writes what the model says of every pixel"),
        ("--sliding=32", "--sliding is for images in which each pixel has one class"),
    ],
)
def test_what_boxes_have_not_is_refused(trained, tmp_path, capsys, option, told):
    write_image(page_of(trained, 0)[0], tmp_path / "scan.png")
    assert main(["predict", str(trained), str(tmp_path / "scan.png"), option]) == 2
    assert told in capsys.readouterr().err


def test_a_file_of_that_name_is_not_overwritten(trained, tmp_path, capsys):
    write_image(page_of(trained, 0)[0], tmp_path / "scan.png")
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/coco_results.json").write_text("mine")
    assert main(["predict", str(trained), str(tmp_path / "scan.png"), "--output", str(tmp_path / "answers")]) == 2
    assert "coco_results.json is there and was not written by a prediction" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.sweep
def test_the_recipe_reaches_its_map(tmp_path):
    """67.3 % were seen on two ranks."""
    RECIPE.check_quality(tmp_path / "run", {"map": 60})
