"""First mornings: what a newcomer does from an empty folder, with the installed wheel and not this checkout.

Each ends with the losses of 20 steps in float64 on one rank, on two, and on tiles of the images, which must agree.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import morning_data
import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from command import losses
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "mornings"
EXACT = (
    "precision=float64",
    "schedule.length=20step",
    "schedule.warmup=2step",
    "evaluate.every=1000ep",
    "log.tensorboard=false",
)
QUIET = "log.tensorboard=false"

pytestmark = [pytest.mark.long, pytest.mark.alone]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder that holds the package as its wheel installs it."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", place, ROOT], check=True)
    (file,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", place / "site", file], check=True)
    return place / "site"


@pytest.fixture
def morning(wheel, tmp_path, monkeypatch):
    """Runs `widefield ...`, or a script, in an empty folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    paths = os.pathsep.join([str(wheel), str(SCRIPTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def go(*words: str, status: int = 0, script: bool = False) -> str:
        command = [sys.executable, *words] if script else [sys.executable, str(wheel / "bin" / "widefield"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return go


def check_plans_agree(morning, recipe: list[str], *plans: str) -> None:
    """The losses of 20 steps in float64 are those of one rank under every plan."""
    alone = _losses(morning, recipe, "alone", "mesh.replicate=1", "mesh.space=[]")
    assert len(alone) == 20 and alone[-1] < alone[0]
    for number, plan in enumerate(plans):
        own = ["mesh.replicate=1", "mesh.space=[]", *plan.split()]
        assert _losses(morning, recipe, f"plan{number}", *own) == pytest.approx(alone, rel=0, abs=1e-8), plan


def _losses(morning, recipe: list[str], name: str, *settings: str) -> list[float]:
    morning("train", *recipe, *EXACT, *settings, "--run", f"exact/{name}")
    return losses(Path("exact") / name)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
@pytest.mark.sweep
def test_photos_by_class_with_a_net_from_a_file(morning):
    morning_data.photos(Path("photos"), size=48)
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(num_classes=1000).state_dict(), "resnet18.pth")  # as one of ImageNet is stored
    recipe = ["imagefolder", "data.path=photos", "data.hold_out=0.25", "model.name=torchvision/resnet18",
              "model.weights=resnet18.pth", "model.weights_strict=false", "data.batch_size=16", "data.workers=0",
              "data.read=[]", "data.read_evaluate=[]", "optimizer.name=adamw", "optimizer.lr=0.001"]  # fmt: skip
    said = morning("train", *recipe, "schedule.length=4ep", "schedule.warmup=1ep", QUIET, "--run", "runs/photos")
    assert "fc.weight" in said  # the head of 1,000 classes was left out, and named
    best = safetensors.torch.load_file("runs/photos/best.safetensors")
    torchvision.models.resnet18(num_classes=2).load_state_dict(best)
    morning("predict", "runs/photos", "photos", "--output", "answers")
    rows = table(Path("answers/predictions.csv"))
    right = [Path(row["input"]).parent.name == row["class"] for row in rows]
    assert len(rows) == 80 and np.mean(right) > 0.85
    check_plans_agree(morning, [*recipe, "data.batch_size=8"], "mesh.replicate=2", "mesh.space=[2,1]")


@pytest.mark.sweep
def test_scans_of_16_bits_with_masks_on_tiles(morning):
    morning_data.scans_with_masks(Path("scans"))
    recipe = ["masks", "data.path=scans", "data.workers=0", "model.options.widths=[8,16,32]", "task.loss=dice_cross_entropy",
              "data.augment=[RandomHorizontalFlip, RandomVerticalFlip, RandomRotation: {degrees: 20}]"]  # fmt: skip
    said = morning(
        "train", *recipe, "mesh.space=[2,1]", "schedule.length=25ep", "schedule.warmup=1ep", QUIET, "--run", "runs/scans"
    )
    assert "uint16" in said
    morning("predict", "runs/scans", "scans/images", "--output", "answers")
    found = [np.asarray(Image.open(f"answers/scan{number:02}.png")) for number in range(16)]
    truth = [np.asarray(Image.open(f"scans/masks/scan{number:02}.png")) for number in range(16)]
    ink = [both[other > 0] for both, other in zip(found, truth, strict=True)]
    assert np.mean(np.concatenate(ink) > 0) > 0.8
    check_plans_agree(morning, recipe, "mesh.replicate=2", "mesh.space=[2,1]", "stream.tiles=[2,2]")


def test_own_dataset_loss_and_metric_in_python(morning):
    said = morning(str(SCRIPTS / "own_parts.py"), "runs/own", script=True)
    assert "'Even'" in said
    told = json.loads(Path("runs/own/evaluation.json").read_text())
    assert told["images"] == 899 and told["metrics"]["top1"] > 90
    few = ["precision=float64", "schedule.length=20step", "schedule.warmup=2step", QUIET]
    morning(str(SCRIPTS / "own_parts.py"), "exact/alone", *few, script=True)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "own_parts.py")]
    for name, plan in {"copies": "mesh.replicate=2", "tiles": "mesh.space=[2,1]"}.items():
        morning(*start, f"exact/{name}", *few, plan, script=True)
        assert losses(Path("exact") / name) == pytest.approx(losses(Path("exact/alone")), rel=0, abs=1e-8)


@pytest.mark.sweep
def test_a_loop_of_ones_own_with_checkpoints_and_an_exact_evaluation(morning):
    def loop(ranks: int, *words: str) -> dict:
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        said = morning(*start, str(SCRIPTS / "own_loop.py"), *words, script=True)
        return json.loads(next(line for line in said.splitlines() if line.startswith("{")))

    alone, both = loop(1, "alone", "60"), loop(2, "both", "60")
    assert (both["images"], both["again"]) == (899, 0) and both["accuracy"] > 0.9
    assert both["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-8) and both["accuracy"] == alone["accuracy"]
    loop(2, "moved", "25")
    assert loop(1, "moved", "60")["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-8)  # begun on 2 ranks, ended on 1


@pytest.mark.sweep
def test_five_folds_by_patients_of_a_table(morning):
    morning_data.table_of_patients(Path("study"))
    recipe = ["manifest", "data.path=study/scans.csv", "data.options.group=patient", "data.hold_out=null",
              "data.workers=0", "data.read=[]", "data.read_evaluate=[]", "data.augment=[]", "model.options={}"]  # fmt: skip
    seen, right = [], []
    for fold in range(5):
        folder = f"runs/fold{fold}"
        morning("train", *recipe, f"data.fold={fold}", "schedule.length=12ep", "schedule.warmup=1ep", QUIET, "--run", folder)
        told = json.loads(Path(folder, "evaluation.json").read_text())
        seen.append(told["images"])
        right.append(told["metrics"]["top1"])
    assert sum(seen) == 300 and min(seen) > 30 and np.mean(right) > 80
    check_plans_agree(morning, [*recipe, "data.fold=0"], "mesh.replicate=2", "mesh.space=[2,1]")


@pytest.mark.long
def test_a_folder_without_a_recipe(morning):
    morning_data.photos(Path("photos"))
    said = morning("train", "photos", QUIET, "--run", "runs/first")
    assert "data.name" in said or "name: imagefolder" in said
    told = json.loads(Path("runs/first/evaluation.json").read_text())
    assert told["metrics"]["top1"] > 80
    morning("init", "photos", "--output", "recipe.yaml")
    check_plans_agree(morning, ["recipe.yaml"], "mesh.replicate=2", "mesh.space=[2,1]")
