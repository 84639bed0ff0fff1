"""The recipe of pages, end to end on one rank, at a size of its own: it learns pixels, shows them and answers for images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command import losses, record
from PIL import Image
from small_recipe import SmallRecipe, check_evaluated_again

from widefield.cli import main
from widefield.comm.mesh import AgreedError
from widefield.data import open_dataset
from widefield.data.image import write_image

SMALL = ["mesh.space=[]", "data.options.size=[48, 40]", "data.options.pages=[6, 5]", "model.options.widths=[4, 6]",
         "schedule.length=4step", "schedule.warmup=2step", "evaluate.every=1000step", "log.tensorboard=false"]  # fmt: skip


RECIPE = SmallRecipe("page", SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return RECIPE.trained(tmp_path_factory.mktemp("page") / "run")


def test_the_recipe_cuts_each_page_over_two_ranks():
    RECIPE.check_space_of_two_ranks()


def test_every_held_out_page_is_evaluated_with_the_metrics_of_its_pixels(trained):
    (line,) = record(trained, "evaluation")
    assert (line["images"], line["of"], line["duplicates"]) == (5, 5, 0)
    assert list(line["metrics"]) == ["iou", "dice", "accuracy"] and len(losses(trained)) == 4
    told = json.loads((trained / "evaluation.json").read_text())
    assert told["unit"] == "pixels" and sum(map(sum, told["confusion"])) == 5 * 48 * 40
    assert re.fullmatch(r"\d+\.\d\d % mean IoU on 5/5 images", told["sentence"])


def test_pictures_of_the_first_pages_are_left_and_shown(trained):
    pages = open_dataset(RECIPE.config().data).evaluate
    told = json.loads((trained / "evaluation.json").read_text())["samples"]
    assert [one["id"] for one in told] == [f"page/evaluate/{number}" for number in range(4)]
    for number, one in enumerate(told):
        image, labels = pages.read(number)
        assert np.array_equal(np.asarray(Image.open(trained / one["image"])), image[0].numpy())
        assert np.array_equal(np.asarray(Image.open(trained / one["truth"])), labels.numpy())
        right = np.asarray(Image.open(trained / one["prediction"])) == labels.numpy()
        assert (one["right"], one["counted"], one["size"]) == (right.sum(), 48 * 40, [48, 40])
    assert (trained / "report.html").read_text().count('<figure class="sample"') == 4


def test_a_resumed_run_of_pages_equals_one_that_was_not_stopped(trained, tmp_path):
    RECIPE.check_resume(trained, tmp_path / "cut", after=2)


def test_the_evaluation_can_be_had_again(trained):
    check_evaluated_again(trained)


def test_a_prediction_leaves_the_class_of_every_pixel_in_the_run_and_nothing_beside_the_image(trained, tmp_path, capsys):
    image, _ = open_dataset(RECIPE.config().data).evaluate.read(2)
    write_image(image, tmp_path / "scan.png")
    assert main(["predict", str(trained), str(tmp_path / "scan.png"), "--top", "11"]) == 0
    said = capsys.readouterr().out.splitlines()
    labels = np.asarray(Image.open(trained / "predictions/scan.png"))
    shown = np.asarray(Image.open(trained / "samples/02_prediction.png"))
    assert np.array_equal(labels, shown), "other classes than the evaluation's"
    assert said[0].startswith(f"{tmp_path / 'scan.png'}  ") and said[0].endswith(f"  -> {trained / 'predictions/scan.png'}")
    assert said[1] == f"1 answered: {trained / 'predictions/predictions.csv'}"
    shares = dict(re.findall(r"(\w+) (\d+\.\d) %", said[0]))
    assert shares["background"] == f"{100 * (labels == 0).mean():.1f}" and len(shares) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["scan.png"]


def test_what_labels_cannot_follow_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(AgreedError, match="data.augment has RandomErasing, which moves or changes pixels"):
        RECIPE.go(tmp_path / "run", "data.augment=[RandomErasing]")
