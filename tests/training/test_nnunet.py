"""nnU-Net's folders: equal losses under every plan on a common spacing, and predictions that lie on the files.

The whole program: read the files of a case, resample all of it, scale, run the net, interpolate its outputs to the grid of the
files, take the greatest.
"""

from __future__ import annotations

import json
from pathlib import Path

import nnunet_folder
import numpy as np
import pytest
import torch
from command import losses
from marks import SWEEP
from ranks import on_ranks
from same_numbers import check_same_numbers
from torch.nn import functional as F

from widefield.cli import main
from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.geometry.box import full_box
from widefield.inference import single_rank
from widefield.prediction.cases import by_case
from widefield.prediction.inputs import Input
from widefield.prediction.session import Predicted, predict_files, predict_objects
from widefield.prediction.wishes import Wishes
from widefield.run import train
from widefield.training.run_folder import read_model

nibabel = pytest.importorskip("nibabel")
CONFIG = """
model: {name: unet, options: {widths: [4, 6], shrink: [[1, 2, 2]], kernels: [[1, 3, 3], 3]}}
data:
  name: masks
  options: {spacing: [2.2, 1.1, 0.9]}
  hold_out: 0.34
  batch_size: 2
  evaluate_batch_size: 1
  workers: 0
  intensity: image
  read: [{ClassBalancedCrop: {size: [6, 12, 10], share: 0.5}}]
  augment: [RandomHorizontalFlip, RandomDepthFlip]
task: {name: segmentation, loss: dice_cross_entropy, metrics: [dice_cases, surface]}
optimizer: {name: sgd, lr: 0.5}
schedule: {name: constant, length: 20step}
evaluate: {every: 20step}
precision: float64
log: {tensorboard: false}
"""
PLANS = {
    "copies": (2, ["mesh.replicate=2"]),
    "planes": (2, ["mesh.replicate=1", "mesh.space=[2,1,1]"]),
    "stream": (1, ["mesh.replicate=1", "stream.tiles=[2,2,2]"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return nnunet_folder.write(tmp_path_factory.mktemp("nnunet") / "Dataset001_Parts")


def go(mesh, data: Path, run: Path, settings: list[str]) -> str:
    return train(parse_config(CONFIG, [f"data.path={data}", *settings]), run, mesh.world).reason


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(parse_config(CONFIG, [f"data.path={folder}", "mesh.replicate=1"]), run, World()).reason == "complete"
    return run


@pytest.mark.long
@pytest.mark.parametrize("plan", [pytest.param("copies", marks=SWEEP), "planes", "stream"])
def test_losses_on_a_common_spacing_are_those_of_one_rank(plan, folder, whole, tmp_path):
    ranks, settings = PLANS[plan]
    if ranks == 1:
        assert train(parse_config(CONFIG, [f"data.path={folder}", *settings]), tmp_path / "run", World()).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, tmp_path / "run", settings) == ["complete"] * ranks
    assert losses(whole)[-1] < losses(whole)[0]
    check_same_numbers(whole, tmp_path / "run")


def test_a_run_knows_its_grid_and_its_files(whole):
    stored = read_model(whole)
    assert stored.resampling is not None and stored.resampling.spacing == (2.2, 1.1, 0.9) and stored.channel_files == 2


def case(folder: Path, number: int) -> list[Path]:
    return [folder / f"imagesTs/case_{number}_{channel:04}.nii.gz" for channel in range(2)]


def by_hand(run: Path, files: list[Path]) -> np.ndarray:
    return likely_by_hand(run, files).argmax(0)


def likely_by_hand(run: Path, files: list[Path]) -> np.ndarray:
    """The probabilities (K, D, H, W) of the whole program in float64."""
    parts, _ = single_rank(run, None, [])
    arrays = [np.asarray(nibabel.load(file).dataobj).T for file in files]
    image = torch.from_numpy(np.stack(arrays).astype(np.float32))
    spacing = [float(length) for length in nibabel.load(files[0]).header.get_zooms()[::-1]]
    map = read_model(run).resampling.map_of(image.shape[1:], spacing)
    assert map.output != map.source
    seen = map.pixels(image, full_box(map.source), full_box(map.output)).double()
    flat = seen.flatten(1)
    seen = (seen - flat.mean(1)[:, None, None, None]) / flat.std(1, correction=0)[:, None, None, None]
    with torch.no_grad():
        output = parts.model.eval()(seen[None])
        return F.interpolate(output, size=map.source, mode="trilinear", align_corners=False)[0].softmax(0).numpy()


def on_these_ranks(mesh, run: Path, data: Path, output: Path, overrides: list[str]) -> Predicted:
    return predict_files(run, [data / "imagesTs"], overrides, mesh.world, output=output)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(1, []), (1, ["stream.tiles=[2,3,2]"]), (2, ["mesh.space=[2,1,1]"]),
     pytest.param(2, ["mesh.space=[1,2,1]", "stream.tiles=[2,1,2]"], marks=pytest.mark.long),
     pytest.param(2, ["mesh.replicate=2"], marks=pytest.mark.long)], ids=str,
)  # fmt: skip
def test_predictions_lie_on_the_files_and_are_those_of_the_whole(ranks, overrides, folder, whole, tmp_path):
    found = on_ranks(ranks, on_these_ranks, whole, folder, tmp_path / "out", overrides)
    assert not found[0].lefts and len(found[0].answers) == 3
    for number in range(6, 9):
        files = case(folder, number)
        labels, image = nibabel.load(tmp_path / f"out/case_{number}.nii.gz"), nibabel.load(files[0])
        assert np.array_equal(np.asarray(labels.dataobj).T, by_hand(whole, files))
        assert np.array_equal(labels.affine, image.affine) and labels.shape == image.shape
        assert labels.header.get_zooms() == image.header.get_zooms()
    assert len(np.unique(np.asarray(labels.dataobj))) > 1, "too easy"


def test_probabilities_are_those_of_the_whole_on_the_voxels_of_the_files(folder, whole, tmp_path):
    files = case(folder, 7)
    found = predict_files(whole, files, [], World(), output=tmp_path / "out", wishes=Wishes(probabilities="npy"))
    assert len(found.answers) == 1 and not found.lefts
    (file,) = (tmp_path / "out/probabilities").iterdir()
    likely = np.moveaxis(np.asarray(nibabel.load(file).dataobj), -1, 0).transpose(0, 3, 2, 1)
    np.testing.assert_allclose(likely, likely_by_hand(whole, files), rtol=0, atol=1e-6)  # float32
    labels = np.asarray(nibabel.load(tmp_path / "out/case_7.nii.gz").dataobj).T
    assert np.array_equal(labels, by_hand(whole, files))
    told = predict_files(whole, files, [], World(), output=tmp_path / "more", wishes=Wishes(sliding=(8, 8, 8))).lefts
    assert "is brought to the run's spacing, on whose grid --sliding does not blend; leave it out" in told[0].reason


def test_files_that_are_of_no_case_are_left_out_in_words(folder, whole, tmp_path):
    place = tmp_path / "scans"
    image, _ = nnunet_folder.volume(6)
    for name in ("odd", "alone_0000", "small_0000"):
        nnunet_folder.save(image.astype(np.float32), place / f"{name}.nii.gz", (2.0, 1.0, 1.0))
    nnunet_folder.save(image[1:].astype(np.float32), place / "small_0001.nii.gz", (2.0, 1.0, 1.0))
    found = predict_files(whole, [place, *case(folder, 6)], [], World(), output=tmp_path / "out")
    told = {Path(left.path).name: left.reason for left in found.lefts}
    assert "names end in _0000 to _0001; rename it" in told["odd.nii.gz"]
    assert "its case 'alone' lacks the file alone_0001 of channel 1; add it" in told["alone_0000.nii.gz"]
    assert "small_0001.nii.gz is 1 x 8 x 22 x 17 and" in told["small_0000.nii.gz"] and len(found.answers) == 1


def test_where_a_case_is_one_file_others_are_cases_too(tmp_path):
    inputs = [Input(tmp_path / f"{name}.nii.gz", Path(name)) for name in ("a_0000", "b", "c_2021", "d_0001")]
    found, lefts = by_case(inputs, 1)
    assert [str(one.name) for one in found] == ["a", "b", "c_2021", "d_0001"] and not lefts
    assert [one.files for one in found] == [(one.path,) for one in inputs]
    found, lefts = by_case([*inputs[:2], inputs[3]], 2)
    assert not found and len(lefts) == 3


def test_tensors_tell_no_spacing_and_are_refused(whole):
    parts, _ = single_rank(whole, None, [])
    with pytest.raises(ValueError, match=r"is taken as it is, and this run brings images to a spacing of 2.2 x 1.1 x 0.9 mm"):
        predict_objects(parts, [torch.zeros(2, 9, 22, 17)], Wishes())


def test_what_tells_no_spacing_is_left_out_in_words(folder, whole, tmp_path):
    for channel in range(2):
        np.save(tmp_path / f"case_{channel:04}.npy", np.zeros((1, 9, 9, 9), dtype=np.float32))
    found = predict_files(whole, [tmp_path, *case(folder, 6)], [], World(), output=tmp_path / "out")
    assert [Path(left.path).name for left in found.lefts] == ["case_0000.npy"]
    assert "this run brings images to" in found.lefts[0].reason and "spacing of 2.2 x 1.1 x 0.9" in found.lefts[0].reason


# ---------------------------------------------------------------------------------------------- from a folder to predictions


@pytest.mark.long
def test_a_folder_trains_and_predicts_with_a_command_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = "data.options={size: [12, 32, 32], volumes: [8, 2], vessels: 0, blobs: 0.8}"
    assert main(["data", "write", "volume", size, "--output", "Dataset002_Vessels"]) == 0
    keys = ["schedule.length=16ep", "mesh.replicate=1", "data.workers=0", "log.tensorboard=false", "optimizer.lr=0.01"]
    assert main(["train", "Dataset002_Vessels/", *keys, "evaluate.every=8ep", "--run", "run"]) == 0
    metrics = json.loads(Path("run/evaluation.json").read_text())["metrics"]
    assert metrics["dice"] > 85  # of background and blobs
    assert main(["evaluate", "run"]) == 0
    assert main(["predict", "run", "Dataset002_Vessels/imagesTs", "--output", "answers"]) == 0
    capsys.readouterr()
    for number in range(2):
        found, truth = (nibabel.load(f"{of}/case_{number:03}.nii.gz") for of in ("answers", "Dataset002_Vessels/labelsTs"))
        assert np.array_equal(found.affine, truth.affine) and found.header.get_zooms() == (1.0, 1.0, 2.0)
        assert (np.asarray(found.dataobj) == np.asarray(truth.dataobj)).mean() > 0.95
