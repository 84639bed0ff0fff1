"""Do volumes, as files and as tensors, get the labels of their voxels, on one rank and on several?"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import widefield as wf
from widefield.cli import main
from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.data import open_dataset
from widefield.inference import single_rank
from widefield.prediction.session import Predicted, Wishes, predict_files
from widefield.run import train

CONFIG = """
model: {name: unet, options: {widths: [4, 6], shrink: [[1, 2, 2]]}}
data: {name: volume, options: {size: [9, 22, 17], volumes: [4, 3], vessels: 1, blobs: 1}, batch_size: 2, workers: 0}
task: {name: segmentation, loss: dice_cross_entropy}
optimizer: {name: sgd, lr: 0.5}
schedule: {name: constant, length: 20step}
evaluate: {every: 20step}
precision: float64
mesh: {replicate: 1}
log: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(parse_config(CONFIG), tmp_path_factory.mktemp("volumes") / "run", World()).run


def volumes() -> list[Tensor]:
    images = open_dataset(parse_config(CONFIG).data).evaluate
    return [images.read(index)[0] for index in range(3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Two volumes with a dim of channels and one, of another size, without."""
    place = tmp_path_factory.mktemp("files")
    for number, volume in enumerate(volumes()):
        np.save(place / f"{number}.npy", volume.numpy() if number else volume[0, :7, :, :15].numpy())
    return place


def answered(run: Path, image: Tensor) -> Tensor:
    """The labels, by the network alone."""
    parts, _ = single_rank(run, None, [], streams=True)
    scaled = (image[None].double() / 255 - 0.269) / 0.095
    with torch.no_grad():
        return parts.model.eval()(scaled)[0].argmax(0)


@pytest.mark.long
def test_files_of_volumes_get_files_of_labels(run, files, tmp_path, capsys):
    assert main(["predict", str(run), str(files), "--output", str(tmp_path / "out"), "--top", "3"]) == 0
    for number in range(3):
        labels, image = np.load(tmp_path / f"out/{number}.npy"), np.load(files / f"{number}.npy")
        image = torch.from_numpy(image if number else image[None])
        assert labels.shape == tuple(image.shape[1:]) and labels.dtype == np.uint8
        assert np.array_equal(labels, answered(run, image).numpy()) and len(np.unique(labels)) >= 2
    rows = list(csv.DictReader((tmp_path / "out/predictions.csv").read_text().splitlines()))
    assert [Path(row["input"]).name for row in rows] == ["0.npy", "1.npy", "2.npy"]
    assert main(["predict", str(run), str(files), "--output", str(tmp_path / "out")]) == 0
    assert "3 answered" in capsys.readouterr().out


def test_files_and_tensors_have_the_same_answers(run, files):
    image = volumes()[1]
    (of_file,), (alone,) = wf.predict(run, files / "1.npy"), wf.predict(run, image)
    several = wf.predict(run, [image, *volumes()[2:]], batch_size=2)
    assert torch.equal(of_file.pixels, answered(run, image).to(torch.uint8))
    for other in (alone, several[0]):
        assert torch.equal(other.pixels, of_file.pixels) and other.probabilities == of_file.probabilities
    assert alone.probabilities[0] == pytest.approx((alone.pixels == 0).double().mean().item())


def test_mirror_images_are_along_all_axes(run):
    """The mean over eight, with the probabilities of each voxel."""
    image = volumes()[0]
    (found,) = wf.predict(run, image, flips=True, probabilities="npy")
    parts, _ = single_rank(run, None, [], streams=True)
    scaled, total = (image[None].double() / 255 - 0.269) / 0.095, 0.0
    with torch.no_grad():
        for bits in range(8):
            dims = [2 + dim for dim in range(3) if bits >> dim & 1]
            total = total + parts.model.eval()(scaled.flip(dims)).softmax(1).flip(dims) / 8
    assert torch.equal(found.pixels, total[0].argmax(0).to(torch.uint8))
    torch.testing.assert_close(found.probabilities_of_pixels.double(), total[0], rtol=0, atol=1e-3)  # float16


def on_these_ranks(mesh, run: Path, files: Path, output: Path, keys: list[str]) -> Predicted:
    wishes = Wishes(flips=True, probabilities="npy")
    return predict_files(run, [files], keys, mesh.world, output=output, wishes=wishes)


@pytest.mark.parametrize("keys", [["mesh.space=[2,1,1]"], ["mesh.space=[1,1,2]"], ["mesh.replicate=2"]], ids=str)
def test_ranks_give_the_labels_of_one(keys, run, files, tmp_path):
    wishes = Wishes(flips=True, probabilities="npy")
    predict_files(run, [files], [], World(), output=tmp_path / "one", wishes=wishes)
    on_ranks(2, on_these_ranks, run, files, tmp_path / "two", keys)
    for name in ("0.npy", "1.npy", "2.npy"):
        assert np.array_equal(np.load(tmp_path / "one" / name), np.load(tmp_path / "two" / name))
        one, two = (np.load(tmp_path / of / "probabilities" / name) for of in ("one", "two"))
        assert one.shape[0] == 3 and one.dtype == np.float16
        np.testing.assert_allclose(one, two, atol=1e-3)


def test_a_stream_gives_the_same_labels(run, files):
    (whole,) = wf.predict(run, files / "1.npy")
    parts, _ = single_rank(run, None, ["stream.tiles=[2,2,2]"], streams=True)
    scaled = (volumes()[1][None].double() / 255 - 0.269) / 0.095
    with torch.no_grad():
        assert torch.equal(parts.model.eval()(scaled)[0].argmax(0).to(torch.uint8), whole.pixels)


@pytest.mark.parametrize(
    "listed",
    ["[{CenterCrop: {size: [5, 16, 17]}}]", "[{CenterCrop: {size: [12, 24, 20]}}]", "[RandomDepthFlip: {p: 1.0}]"],
)
def test_labels_lie_on_the_voxels_of_the_file_whatever_evaluation_crops(listed, run, tmp_path):
    """What a crop leaves out has the label that does not count; what it adds is left out again."""
    image = volumes()[0]
    np.save(tmp_path / "scan.npy", image.numpy())
    keys = [f"data.read_evaluate={listed}"]
    found = predict_files(run, [tmp_path / "scan.npy"], keys, World(), output=tmp_path / "out")
    labels = torch.from_numpy(np.load(tmp_path / "out/scan.npy"))
    assert tuple(labels.shape) == tuple(image.shape[1:])
    if "RandomDepthFlip" in listed:
        assert torch.equal(labels, answered(run, image.flip(1)).flip(0).to(torch.uint8))
        return
    sizes = [int(size) for size in listed.partition("size: [")[2].partition("]")[0].split(",")]
    inside = torch.zeros(image.shape[1:], dtype=torch.bool)
    runs = [slice(max(0, round((extent - side) / 2)), max(0, round((extent - side) / 2)) + min(side, extent))
            for side, extent in zip(sizes, image.shape[1:], strict=True)]  # fmt: skip
    inside[tuple(runs)] = True
    assert torch.equal(labels != 255, inside) and found.answers[0].left_out == int((~inside).sum())
    if sizes[0] < 9:
        assert torch.equal(labels[tuple(runs)], answered(run, image[:, *runs]).to(torch.uint8))


# ---------------------------------------------------------------------------------------------- layers


class Net(torch.nn.Conv3d):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(1, 2, 3, padding=1)


def test_several_classes_per_voxel_have_a_file_each(tmp_path):
    pairs = [(one, torch.stack([one[0] > 90, one[0] > 60]).to(torch.uint8)) for one in volumes()[:2]]
    config = {"data": {"batch_size": 1, "workers": 0}, "task": {"name": "multilabel_segmentation"}, "mesh": {"replicate": 1},
              "schedule": {"name": "constant", "length": "2step"}, "log": {"tensorboard": False}}  # fmt: skip
    folder = wf.train(config, run=tmp_path / "run", model=Net(), data=(pairs, pairs), classes=["hot spot", "warm"]).run
    np.save(tmp_path / "scan.npy", pairs[0][0].numpy())
    (answer,) = wf.predict(folder, tmp_path / "scan.npy", model=Net(), output=tmp_path / "out")
    found = [np.load(tmp_path / f"out/scan.{name}.npy") for name in ("hot_spot", "warm")]
    (alone,) = wf.predict(folder, pairs[0][0], model=Net())
    assert answer.labels == str(tmp_path / "out/scan.hot_spot.npy")
    assert np.array_equal(np.stack(found), alone.pixels.numpy()) and found[0].shape == (9, 22, 17)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (torch.zeros(1, 9, 9, dtype=torch.uint8), r"is of shape \(1, 9, 9\) and this run was trained on volumes \(C, D, H"),
        (torch.zeros(2, 9, 9, 9, dtype=torch.uint8), "image 0 has 2 channels of uint8 numbers and this run was trained on 1"),
        (torch.zeros(1, 9, 9, 9), "image 0 has 1 channels of floating-point numbers"),
    ],
)  # fmt: skip
def test_what_is_no_volume_of_the_run_is_refused_in_words(image, told, run):
    with pytest.raises(ValueError, match=told):
        wf.predict(run, [image])


def test_files_that_are_no_volumes_are_left_out_in_words(run, tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((9, 9), dtype=np.uint8))
    np.save(tmp_path / "deep.npy", np.zeros((1, 1, 9, 9, 9), dtype=np.uint8))
    from widefield.data.image import write_image

    write_image(torch.zeros(1, 9, 9, dtype=torch.uint8), tmp_path / "photo.png")
    found = predict_files(run, [tmp_path], [], World(), output=tmp_path / "out")
    told = {Path(left.path).name: left.reason for left in found.lefts}
    assert "an array of shape (9, 9) is no volume; save (D, H, W) or (C, D, H, W)" in told["flat.npy"]
    assert "an array of shape (1, 1, 9, 9, 9) is no volume" in told["deep.npy"]
    assert "is of shape (1, 9, 9) and this run was trained on volumes" in told["photo.png"]


def test_outlines_of_volumes_are_refused_in_words(run, files, tmp_path):
    with pytest.raises(ValueError, match="--outlines writes polygons, which are flat, and this run was trained on volumes"):
        predict_files(run, [files], [], World(), output=tmp_path / "out", wishes=Wishes(outlines=True))


@pytest.mark.parametrize("wishes", [Wishes(overlays=True), Wishes(probabilities="png")])
def test_pictures_of_volumes_are_refused_in_words(wishes, run, files, tmp_path):
    with pytest.raises(ValueError, match="writes pictures, and this run was trained on volumes; leave it out, or take --prob"):
        predict_files(run, [files], [], World(), output=tmp_path / "out", wishes=wishes)
