"""A folder in place of a recipe: what is in it is found, the recipe says why, is never overwritten, and trains well."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from command import run
from PIL import Image

from widefield.cli import main
from widefield.config import parse_config, read_config
from widefield.first_recipe import choices, recipe_for
from widefield.first_recipe.look import format_of, look_at
from widefield.tasks import build as build_task
from widefield.tasks import labels_of

KINDS = {"bars": 40, "disk": 12, "noise": 40}


def photos(place, *, size=None, channels=3):
    """Class folders of three kinds of pictures, one class rarer, of different sizes unless `size` is given."""
    draws = np.random.default_rng(0)
    for kind, count in KINDS.items():
        (place / kind).mkdir(parents=True)
        for number in range(count):
            height, width = size or draws.integers(40, 60, 2)
            y, x = np.mgrid[:height, :width]
            pixels = draws.integers(20, 80, (height, width))
            pixels[
                {"bars": (x // 4) % 2 == 0, "disk": (y - height / 2) ** 2 + (x - width / 2) ** 2 < 200, "noise": x < 0}[kind]
            ] += 150
            image = pixels.astype(np.uint8)
            Image.fromarray(np.stack([image] * 3, -1) if channels == 3 else image).save(place / kind / f"{number}.png")
    return place


def cells(place, *, count=12):
    """images/ and masks/ of blobs."""
    draws = np.random.default_rng(0)
    for name in ("images", "masks"):
        (place / name).mkdir(parents=True)
    for number in range(count):
        y, x = np.mgrid[:48, :40]
        inside = (y - draws.integers(12, 36)) ** 2 + (x - draws.integers(12, 28)) ** 2 < 80
        image = draws.integers(1000, 9000, (48, 40)) + 20000 * inside
        Image.fromarray(image.astype(np.uint16)).save(place / "images" / f"{number}.png")
        Image.fromarray(inside.astype(np.uint8)).save(place / "masks" / f"{number}.png")
    return place


def test_class_folders_of_different_sizes_give_a_classifier_with_its_reasons(tmp_path):
    text = recipe_for(photos(tmp_path / "photos"), name="photos.yaml")
    config = parse_config(text)
    assert (config.data.name, config.data.path, config.data.hold_out) == ("imagefolder", str(tmp_path / "photos"), 0.2)
    assert config.task.name == "classification" and config.task.class_weights == "balanced"
    assert "# Written for" in text and "widefield train photos.yaml" in text and "px" in text and "disk" in text
    assert config.data.read == [{"RandomResizedCrop": {"size": 32, "scale": [0.5, 1.0], "antialias": True}}]
    assert config.model.name == "resnet" and config.data.batch_size == 8
    assert [
        line for line in text.splitlines() if line.strip().startswith(("name: resnet", "length:")) and "#" not in line
    ] == []


def test_small_images_of_one_size_are_read_as_they_are_and_balanced_classes_are_not_weighted(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "disk", 40)
    config = parse_config(recipe_for(photos(tmp_path / "photos", size=(24, 20))))
    assert config.data.read == [] and config.data.augment == [{"RandomCrop": {"size": [24, 20], "padding": 2}}]
    assert config.task.class_weights is None


def test_masks_give_a_unet_and_a_loss_of_areas(tmp_path):
    config = parse_config(recipe_for(cells(tmp_path / "cells")))
    assert (config.data.name, config.model.name, config.task.name) == ("masks", "unet", "segmentation")
    assert config.task.loss == "dice_cross_entropy"


def test_a_table_gives_the_task_of_its_labels(tmp_path):
    photos(tmp_path / "photos", size=(24, 20))
    rows = [f"{kind}/{number}.png,{kind}" for kind, count in KINDS.items() for number in range(count)]
    (tmp_path / "photos" / "images.csv").write_text("image,label\n" + "\n".join(rows) + "\n")
    assert format_of(tmp_path / "photos") == ("manifest", tmp_path / "photos" / "images.csv")
    config = parse_config(recipe_for(tmp_path / "photos"))
    assert (config.data.name, config.task.name) == ("manifest", "classification")


@pytest.mark.parametrize(("labels", "name"), choices.TASKS.items())
def test_every_kind_of_labels_has_a_task_that_is_there(labels, name):
    config = parse_config(f"model: {{name: a}}\ndata: {{name: a}}\ntask: {{name: {name}}}")
    assert labels_of(build_task(config.task, num_classes=3)) == labels


def test_pretrained_weights_are_taken_where_they_are_at_hand(tmp_path, monkeypatch):
    from torchvision.models import get_model_weights

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert choices._weights_at_hand() is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / get_model_weights("resnet18").DEFAULT.url.rpartition("/")[2]).touch()
    assert choices._weights_at_hand() == "resnet18"


def test_the_batch_fits_the_memory(tmp_path, monkeypatch):
    look = look_at(photos(tmp_path / "photos", size=(24, 20)))
    config = parse_config("model: {name: resnet}\ndata: {name: a}").model
    kept = choices.kept_bytes(look, config, (24, 20))
    assert 24 * 20 * 16 * 4 * 2 < kept < 24 * 20 * 16 * 4 * 100
    monkeypatch.setattr(choices, "free_memory", lambda: 2 * 2.5 * kept)
    assert choices._batch(look, config, (24, 20), is_pixels=False)[0].value == 2
    monkeypatch.setattr(choices, "free_memory", lambda: kept)
    assert [one.key for one in choices._batch(look, config, (24, 20), is_pixels=True)] == ["data.batch_size", "stream.memory"]


@pytest.mark.parametrize(
    ("make", "told"), [(None, "there is no folder"), ("", "has nothing"), ("notes.txt", "has notes.txt, and")]
)
def test_a_folder_that_cannot_be_trained_on_says_what_is_wanted(make, told, tmp_path, capsys):
    folder = tmp_path / "photos"
    if make is not None:
        folder.mkdir()
    if make:
        (folder / make).touch()
    assert main(["init", str(folder), "--output", str(tmp_path / "r.yaml")]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "r.yaml").exists()


def test_a_recipe_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("mine")
    assert main(["init", str(photos(tmp_path / "photos")), "--output", str(tmp_path / "r.yaml")]) == 2
    assert "is there already, and is not overwritten; name another file with --output" in capsys.readouterr().err
    assert (tmp_path / "r.yaml").read_text() == "mine"
    assert main(["init", str(tmp_path / "photos"), "--output", str(tmp_path / "no" / "r.yaml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_init_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    assert main(["init", "photos/"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith((tmp_path / "photos.yaml").read_text()) and "train it with: widefield train photos.yaml" in printed
    )
    assert read_config("photos.yaml").data.path == "photos"


def test_a_recipe_of_other_images_is_not_taken_for_a_folder_and_ranks_do_not_write_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0"), patch.setenv("LOCAL_RANK", "0")
        assert main(["train", "photos/"]) == 2
    assert "2 ranks would each write a recipe; write it once before: widefield init photos/" in capsys.readouterr().err
    (tmp_path / "photos.yaml").write_text("model: {name: resnet}\ndata: {name: imagefolder, path: other}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        assert main(["train", "photos/"]) == 2
    assert "which is there and is for other; write another one: widefield init photos/ --output" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.alone
def test_a_folder_without_a_recipe_trains_and_resumes_its_own_recipe(tmp_path):
    photos(tmp_path / "photos")
    told = run("train", "photos/", "schedule.length=8ep", "seed=1", "--run", "runs/one", cwd=tmp_path)
    assert "written to photos.yaml" in told and "# Written for photos" in told and "trained to the end" in told
    assert json.loads((tmp_path / "runs/one/evaluation.json").read_text())["metrics"]["top1"] > 80
    assert yaml.safe_load((tmp_path / "photos.yaml").read_text())["data"]["path"] == "photos"
    again = run("train", "photos/", "schedule.length=8ep", "seed=1", "--run", "runs/one", cwd=tmp_path)
    assert "photos.yaml is there already and is used" in again
