"""A folder of volumes in place of a recipe: spacing, patch or whole, intensity and network follow from what is in it."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import nnunet_folder
import numpy as np
import pytest
import torch

from widefield.cli import main
from widefield.config import parse_config
from widefield.data import open_dataset
from widefield.first_recipe import recipe_for, volume_plan, volumes
from widefield.models import build

pytest.importorskip("nibabel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return nnunet_folder.write(tmp_path_factory.mktemp("nnunet") / "Dataset001_Parts", tests=0)


@pytest.fixture
def of_ct(tmp_path) -> Path:
    """One channel, one spacing."""
    folder = nnunet_folder.write(tmp_path / "Dataset003_CT", count=3, tests=0, channels=("CT",))
    for number in range(3):
        image, labels = nnunet_folder.volume(0, seed=number)
        nnunet_folder.save(image.astype(np.int16) * 8 - 1000, folder / f"imagesTr/case_{number}_0000.nii.gz", (2.0, 1.0, 1.0))
        nnunet_folder.save(labels, folder / f"labelsTr/case_{number}.nii.gz", (2.0, 1.0, 1.0))
    return folder


def test_rules_of_spacings_and_levels_are_those_of_their_examples():
    assert doctest.testmod(volume_plan).failed == 0 and doctest.testmod(volume_plan).attempted >= 3


def test_volumes_of_several_spacings_are_brought_to_one_with_the_reasons(folder):
    text = recipe_for(folder, name="parts.yaml")
    config = parse_config(text)
    assert (config.data.name, config.task.name, config.task.loss) == ("masks", "segmentation", "dice_cross_entropy")
    assert config.data.options == {"spacing": [2.0, 1.0, 1.0]} and config.data.hold_out == 0.2
    assert config.data.intensity.name == "image" and "CT, PET" in text and "is scaled as these are" in text
    assert (config.data.batch_size, config.data.read) == (1, []) and config.task.metrics == ["dice_cases", "surface"]
    assert config.model.options["shrink"][0] == [1, 2, 2] and config.model.options["norm"] == "group"
    assert "several spacings, 2 x 1 x 1 mm in the middle" in text and "files have 1.6 x 0.8 x 0.9 to 2.5 x 1 x 1.2 mm" in text
    dataset = open_dataset(config.data)
    assert (dataset.channels, dataset.dims, dataset.resampling.spacing) == (2, 3, (2.0, 1.0, 1.0))
    model = build(config.model, in_channels=2, num_classes=3, dims=3)
    assert model(torch.zeros(1, *dataset.train.shape(0))).shape == (1, 3, *dataset.train.shape(0)[1:])


def test_ct_is_clipped_and_scaled_by_its_foreground_and_one_spacing_stays(of_ct):
    text = recipe_for(of_ct)
    config = parse_config(text)
    asked = config.data.intensity
    assert (asked.name, asked.percentiles, asked.area) == ("zscore", [0.5, 99.5], "foreground")
    assert config.data.options == {} and "spacing 2 x 1 x 1 mm" in text and config.data.batch_size == 2


def test_a_channel_without_name_is_ct_where_whole_numbers_are_those_of_air(of_ct):
    about = json.loads((of_ct / "dataset.json").read_text())
    (of_ct / "dataset.json").write_text(json.dumps({key: value for key, value in about.items() if key != "channel_names"}))
    assert parse_config(recipe_for(of_ct)).data.intensity.area == "foreground"


def test_volumes_that_do_not_fit_are_trained_in_patches(folder, monkeypatch):
    monkeypatch.setitem(volumes.MOST_VOXELS, False, 2500)
    config = parse_config(recipe_for(folder))
    (crop,) = config.data.read
    size = crop["ClassBalancedCrop"]["size"]
    assert crop["ClassBalancedCrop"]["share"] == 0.33 and np.prod(size) <= 1250 and config.data.batch_size == 2
    assert "norm" not in config.model.options and size[1] >= size[0]


def test_splits_final_gives_the_fold(folder, capsys):
    path = folder / "splits_final.json"
    halves = [[f"case_{number}" for number in range(6) if number % 2 == half] for half in range(2)]
    sides = [{"train": halves[1 - fold], "val": halves[fold]} for fold in range(2)]
    path.write_text(json.dumps(sides))
    try:
        config = parse_config(recipe_for(folder))
        assert (config.data.fold, config.data.hold_out) == (0, None) and len(open_dataset(config.data).evaluate) == 3
        assert main(["data", "stats", str(folder)]) == 0 and "3 images to train on" in capsys.readouterr().out
    finally:
        path.unlink()


# ---------------------------------------------------------------------------------------------- nnU-Net's own files


def test_a_fingerprint_and_a_plan_are_written_and_the_plan_is_read(of_ct, capsys):
    before = parse_config(recipe_for(of_ct))
    assert main(["data", "stats", str(of_ct), "data.hold_out=0.34", "--fingerprint"]) == 0
    assert "nnUNetPlans.json" in capsys.readouterr().out
    told = json.loads((of_ct / "dataset_fingerprint.json").read_text())
    assert told["spacings"] == [[2.0, 1.0, 1.0]] * 2 and told["shapes_after_crop"] == [[9, 22, 17]] * 2
    config = parse_config("model: {name: a}\ntask: {name: a}\ndata: {name: masks, hold_out: 0.34}", [f"data.path={of_ct}"]).data
    images = open_dataset(config).train
    pairs = [images.read(index) for index in range(2)]
    inside = np.concatenate([image[0][marks > 0].numpy() for image, marks in pairs])
    found = told["foreground_intensity_properties_per_channel"]["0"]
    wanted = {"mean": inside.mean(), "std": inside.std(), "min": inside.min(), "max": inside.max(), "median": np.median(inside),
              "percentile_00_5": np.percentile(inside, 0.5), "percentile_99_5": np.percentile(inside, 99.5)}  # fmt: skip
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-12)
    plan = json.loads((of_ct / "nnUNetPlans.json").read_text())["configurations"]["3d_fullres"]
    assert plan["spacing"] == [2.0, 1.0, 1.0] and plan["normalization_schemes"] == ["CTNormalization"]
    after = recipe_for(of_ct)
    config = parse_config(after)
    assert "of nnUNetPlans.json" in after and {**config.model.options, "norm": "group"} == before.model.options
    assert config.data.read[0]["ClassBalancedCrop"]["size"] == plan["patch_size"]
    assert config.data.intensity.area == "foreground"
    assert main(["data", "stats", str(of_ct), "data.hold_out=0.34", "--fingerprint"]) == 2
    assert "dataset_fingerprint.json is there already, and is not overwritten" in capsys.readouterr().err


def plan_file(**changes) -> dict:
    """As nnU-Net v2.2 writes it, with axes in another order: width, height, depth."""
    about = {
        "batch_size": 3, "patch_size": [16, 20, 8], "spacing": [0.8, 1.0, 2.5],
        "normalization_schemes": ["ZScoreNormalization"] * 2,
        "pool_op_kernel_sizes": [[1, 1, 1], [2, 2, 1], [2, 2, 2]], "conv_kernel_sizes": [[3, 3, 1], [3, 3, 3], [3, 3, 3]],
        "UNet_base_num_features": 16, "unet_max_num_features": 320,
    }  # fmt: skip
    return {"transpose_forward": [2, 1, 0], "configurations": {"3d_fullres": about | changes}}


def test_a_plan_of_nnunet_makes_the_recipe(folder):
    path = folder / "nnUNetPlans.json"
    try:
        path.write_text(json.dumps(plan_file()))
        config = parse_config(recipe_for(folder))
        assert config.data.options == {"spacing": [2.5, 1.0, 0.8]} and config.data.batch_size == 3
        assert config.data.read == [{"ClassBalancedCrop": {"size": [8, 20, 16], "share": 0.33}}]
        shrink, kernels = [[1, 2, 2], [2, 2, 2]], [[1, 3, 3], [3, 3, 3], [3, 3, 3]]
        assert config.model.options == {"widths": [16, 32, 64], "shrink": shrink, "kernels": kernels}
        for changes, told in (
            ({"normalization_schemes": ["RescaleTo01Normalization"] * 2}, "has the normalization RescaleTo01Normalization"),
            ({"normalization_schemes": ["CTNormalization"]}, "1 normalizations for 2 channels"),
            ({"patch_size": None}, "cannot be read .*3d_fullres"),
        ):
            path.write_text(json.dumps(plan_file(**changes)))
            with pytest.raises(ValueError, match=told):
                recipe_for(folder)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["data", "write", "volume"], "data write makes a folder of files: name it, as --output scans"),
        (["data", "stats", "volume", "--output", "a"], "--output is of data write"),
        (
            ["data", "write", "page", "data.options.size=[64,64]", "--output", "new"],
            "the data has 2 dims and labels of the kind",
        ),
        (["data", "write", "volume", "--output", "."], "is there already, and is not overwritten"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    assert main(arguments) == 2
    assert told in capsys.readouterr().err and sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]
