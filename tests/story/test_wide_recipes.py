"""The recipes `scene` and `slide`, at a size of their own, on two ranks that share every image: do they learn?"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import RECIPES, record, run

COMMON = ["evaluate.every=100ep", "log.tensorboard=false", "data.workers=0"]


def metrics(folder: Path, name: str, *settings: str) -> dict:
    run("train", RECIPES / f"{name}.yaml", "--run", folder, *COMMON, *settings)
    assert len(record(folder, "start")) == 1 and record(folder, "start")[0]["ranks"] == 2
    told = record(folder, "evaluation")[-1]
    assert told["images"] == told["of"] and told["duplicates"] == 0
    return told["metrics"]


@pytest.mark.long
@pytest.mark.alone
def test_the_recipe_of_scenes_tells_four_kinds_of_land_apart(tmp_path):
    small = ["data.options={size: [160, 160], scenes: [8, 3], feature_px: 24}", "schedule.length=6ep"]
    assert metrics(tmp_path / "run", "scene", *small)["iou"] > 85


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.alone
def test_the_recipe_of_scenes_learns_from_patches_too(tmp_path):
    small = ["data.options={size: [160, 160], scenes: [8, 3], feature_px: 24}", "schedule.length=4ep", "data.batch_size=2"]
    patches = "data.patches={size: [64, 64], per_image: 6, foreground: 0.5}"
    assert metrics(tmp_path / "run", "scene", *small, patches)["iou"] > 85


@pytest.mark.long
@pytest.mark.alone
def test_the_recipe_of_slides_finds_those_with_a_tumour_pooling_over_tissue(tmp_path):
    small = ["data.options={size: [192, 160], slides: [32, 16], tumour_px: 40}", "schedule.length=8ep", "data.tissue=otsu"]
    pooling = ["model.options={widths: [8, 16, 24], blocks: 1, pooling: attention, tissue: true}"]
    assert metrics(tmp_path / "run", "slide", *small, *pooling)["top1"] > 90
