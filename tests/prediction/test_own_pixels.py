"""Do predictions see what evaluation sees, and do labels lie on the pixels of the file, whatever data.read_evaluate does?"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import on_ranks
from torchvision.transforms import v2

import widefield as wf
from widefield.cli import main
from widefield.comm.mesh import Mesh, World
from widefield.config import parse_config, read_config
from widefield.data.intensity import Intensity
from widefield.data.pixel_transforms import OfImagesAlone
from widefield.plans import Plan
from widefield.prediction.session import Wishes, predict_files
from widefield.prediction.transformed import transformed, transforms_of
from widefield.run import train
from widefield.training.assemble import assemble
from widefield.training.run_folder import load_weights

CPU = torch.device("cpu")
SIZE = 13, 11
CONFIG = """
model: {name: unet, options: {widths: [4], norm: group}}
data: {name: masks, batch_size: 4, workers: 0, fold: 1, folds: 3, intensity: image, evaluate_batch_size: 1}
task: {name: segmentation, options: {ignore_index: -1}}
optimizer: {name: sgd, lr: 0.5}
schedule: {name: constant, length: 24step}
mesh: {replicate: 1}
log: {tensorboard: false}
precision: float64
"""
RESIZE, CROP, PAD = "[{Resize: {size: [8, 17]}}]", "[{CenterCrop: {size: [6, 8]}}]", "[{Pad: {padding: [1, 2, 4, 3]}}]"
LISTS = {"Resize": RESIZE, "CenterCrop": CROP, "Pad": PAD, "both": f"{PAD[:-1]}, {RESIZE[1:]}"}


def folder(place: Path) -> Path:
    """Nine grey images of 16 bits and odd sizes, whose mean is not that of their center, with two classes."""
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (place / name).mkdir(parents=True)
    for number in range(9):
        pixels = random.integers(0, 2000 + 900 * number, SIZE)
        pixels[3:10, 2:9] += 20_000
        Image.fromarray(pixels.astype(np.uint16)).save(place / "images" / f"{number}.png")
        Image.fromarray((pixels > 15_000).astype(np.uint8)).save(place / "masks" / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    data = folder(tmp_path_factory.mktemp("data"))
    return train(parse_config(CONFIG, [f"data.path={data}"]), tmp_path_factory.mktemp("runs") / "run", World()).run


def evaluated(run: Path, transforms: str) -> dict[str, torch.Tensor]:
    """The probabilities (K, h, w) that evaluation has for the pixels of each of its transformed images, by the files' paths."""
    parts = assemble(read_config(run / "config.yaml", [f"data.read_evaluate={transforms}"]), Mesh(Plan(), World(), CPU))
    load_weights(run / "weights.safetensors", parts.model)
    parts.model.eval()
    found = {}
    with torch.no_grad():
        for batch in parts.evaluation_batches():
            image, _ = parts.preparation(train=False)(batch)
            found[parts.dataset.evaluate.name_of(int(batch.index[0]))] = parts.model(image).softmax(1)[0]
    return found


def nearest(extent: int, after: int) -> torch.Tensor:
    """For each of `extent` pixels, the number of that of `after` pixels in which its center lies."""
    return torch.tensor([(2 * pixel + 1) * after // (2 * extent) for pixel in range(extent)])


def on_file(likely: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities on the pixels of the file, and which of these have any, worked out by hand."""
    inside = torch.ones(SIZE, dtype=torch.bool)
    if name == "Resize":
        return likely[:, nearest(13, 8)][:, :, nearest(11, 17)], inside
    if name == "Pad":
        return likely[:, 2:15, 1:12], inside
    if name == "both":
        return likely[:, nearest(18, 8)][:, :, nearest(16, 17)][:, 2:15, 1:12], inside
    whole, inside = torch.zeros((2, *SIZE), dtype=likely.dtype), torch.zeros(SIZE, dtype=torch.bool)
    top, left = 4, 2  # (13 - 6) / 2 and (11 - 8) / 2, as torchvision rounds them
    whole[:, top : top + 6, left : left + 8], inside[top : top + 6, left : left + 8] = likely, True
    return whole, inside


@pytest.mark.parametrize("name", LISTS)
def test_predictions_are_those_of_evaluation_on_the_pixels_of_the_file(name, run, tmp_path, capsys):
    seen = evaluated(run, LISTS[name])
    arguments = [
        str(run),
        *seen,
        f"data.read_evaluate={LISTS[name]}",
        "--output",
        str(tmp_path),
        "--probabilities",
        "--overlays",
    ]
    assert main(["predict", *arguments, "--weights", "last"]) == 0
    why = "nodata, or left out by data.read_evaluate"
    said = f"some pixels of 3 images have no answer ({why}); their label is -1, which a PNG has as 255"
    assert (said in capsys.readouterr().err) == (name == "CenterCrop")
    with (tmp_path / "predictions.csv").open() as file:
        rows = {row["input"]: row for row in csv.DictReader(file)}
    for path, likely in seen.items():
        wanted, inside = on_file(likely, name)
        found, stem = np.load(tmp_path / f"probabilities/{Path(path).stem}.npy"), Path(path).stem
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-3)  # rounded to float16
        labels = torch.where(inside, wanted.argmax(0), 255).numpy()
        assert np.array_equal(np.asarray(Image.open(tmp_path / f"{stem}.png")), labels)
        assert 0 < (labels == 1).sum() < labels.size
        assert np.asarray(Image.open(tmp_path / f"overlays/{stem}.png")).shape == (*SIZE, 3)
        share = (labels == 1).sum() / int(inside.sum())
        assert float(rows[path]["share of 1"]) == pytest.approx(share, abs=1e-5)


def test_the_answers_say_how_many_pixels_were_left_out(run, tmp_path):
    path = next(iter(evaluated(run, CROP)))
    for _ in range(2):  # the second time from the journal
        found = predict_files(run, [path], [f"data.read_evaluate={CROP}"], World(), output=tmp_path)
        assert [answer.left_out for answer in found.answers] == [13 * 11 - 6 * 8] and found.ignore == -1
    tree = json.loads((tmp_path / "predictions.json").read_text())
    assert tree["predictions"][0]["left_out"] == 95
    assert sum(tree["predictions"][0]["probabilities"]) == pytest.approx(1, abs=1e-12)  # shares of the others


def on_tiles(mesh: Mesh, run: Path, words: list[str], overrides: list[str], output: Path) -> list:
    wishes = Wishes(probabilities="npy", overlays=True, batch_size=3)
    return predict_files(run, words, overrides, mesh.world, output=output, wishes=wishes).lefts


def test_tiles_bring_labels_back_as_one_rank_does(run, tmp_path):
    words = list(evaluated(run, CROP))
    for name in ("Resize", "CenterCrop"):
        overrides, one, two = [f"data.read_evaluate={LISTS[name]}"], tmp_path / name / "1", tmp_path / name / "2"
        assert on_tiles(Mesh(Plan(), World(), CPU), run, words, overrides, one) == []
        assert on_ranks(2, on_tiles, run, words, [*overrides, "mesh.space=[2,1]", "mesh.replicate=1"], two) == [[], []]
        for word in words:
            file = Path(word).stem + ".png"
            assert np.array_equal(np.asarray(Image.open(one / file)), np.asarray(Image.open(two / file)))


# ---------------------------------------------------------------------------------------------- one image's way there and back


def parts_with(listed: list, *, labels: str = "pixels", ignore: int | None = 255, classes: int = 3):
    """What of a run's parts the transforms look at."""
    task = SimpleNamespace(labels=labels, ignore_index=ignore)
    names = list(map(str, range(classes)))
    dataset = SimpleNamespace(classes=names, moves_as_one=True, intensity=Intensity(), dims=2)
    return SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(read_evaluate=listed)), dataset=dataset, task=task)


def there(parts, image: torch.Tensor):
    transforms = transforms_of(parts)
    assert isinstance(transforms, OfImagesAlone)
    return transformed(image, transforms, parts)


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (16, 16), (31, 64), (97, 103)])
@pytest.mark.parametrize("after", [[7, 9], [8, 8], [32, 32], [201, 5]])
def test_a_resized_image_has_labels_of_the_nearest_pixel_whatever_its_size(size, after):
    image = torch.arange(size[0] * size[1]).remainder(251).to(torch.uint8).view(1, *size)
    found = there(parts_with([{"Resize": {"size": after}}]), image)
    assert found.image.shape[1:] == tuple(after) and found.outside is None and found.original is image
    places = torch.arange(after[0] * after[1]).view(1, *after)
    rows, columns = (nearest(*pair) for pair in zip(size, after, strict=True))
    assert torch.equal(found.on_original(places), places[:, rows][:, :, columns])


def test_moves_that_copy_pixels_are_undone_exactly():
    image = torch.randint(256, (2, 9, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    turned = [{"RandomRotate90": {}}, {"RandomHorizontalFlip": {"p": 1.0}}, {"Pad": {"padding": 3}}]
    found = there(parts_with(turned), image)
    assert torch.equal(found.on_original(found.image), image) and found.outside is None
    own = there(parts_with([{"RandomVerticalFlip": {"p": 1.0}}, "case_transforms:darker"]), image)
    assert torch.equal(own.on_original(own.image), image // 2)


def test_what_cannot_be_brought_back_is_refused_in_words():
    image = torch.zeros((1, 9, 7), dtype=torch.uint8)
    crop = [{"CenterCrop": {"size": [3, 4]}}]
    for labels, ignore, classes in (("pixels", None, 3), ("layers", 255, 3), ("pixels", -1, 256)):
        with pytest.raises(ValueError, match="leaves out 51 of the image's 63 pixels, and the task has no label for pixels"):
            there(parts_with(crop, labels=labels, ignore=ignore, classes=classes), image)
    found = there(parts_with(crop), image)
    labels = found.on_original(torch.ones((1, 3, 4), dtype=torch.uint8), fill=255)
    assert labels.dtype == torch.uint8 and labels.unique(return_counts=True)[1].tolist() == [12, 51]
    with pytest.raises(ValueError, match=r"transform of your own in .* makes an image of \(4, 7\) of one of \(9, 7\) pixels"):
        there(parts_with(["case_transforms:upper_half"]), image)
    with pytest.raises(ValueError, match=r"makes an image of \(4, 7\) of one of \(9, 7\) pixels"):
        there(parts_with(["case_transforms:upper_half", {"Resize": {"size": [9, 7]}}]), image)
    with pytest.raises(NotImplementedError, match="has ElasticTransform, whose displacements have no inverse in closed form"):
        transforms_of(parts_with(["ElasticTransform"]))


def test_an_elastic_evaluation_is_refused_before_a_folder_is_made(run, tmp_path, capsys):
    path = next(iter(evaluated(run, "[]")))
    overrides = ["data.read_evaluate=[ElasticTransform]", "--output", str(tmp_path / "out")]
    assert main(["predict", str(run), path, *overrides]) != 0
    assert "has ElasticTransform, whose displacements have no inverse" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------- labels of images


def test_the_mean_of_an_image_is_that_before_the_transforms_for_labels_of_images_too(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (8, 1, 12, 12), dtype=torch.uint8, generator=generator)
    images[:, :, 3:9, 3:9] //= 8
    data = [(image, number % 2) for number, image in enumerate(images)]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    crop = "[{CenterCrop: {size: 6}}]"
    settings = ["schedule.length=1step", "schedule.warmup=0step", "data.batch_size=4", "log.tensorboard=false"]
    settings += ["data.mean=null", "data.std=null", "mesh.replicate=1", "data.intensity=image"]
    settings += [f"data.read={crop}", f"data.read_evaluate={crop}"]
    recipe = {"model": {"name": "resnet"}, "data": {"name": "digits"}}
    run = wf.train(recipe, *settings, model=net, data=(data, data), classes=2, run=tmp_path / "run").run
    answers = wf.predict(run, list(images), top=2, model=net, weights="last")
    values = images.double()
    mean, spread = values.mean((2, 3), keepdim=True), values.std((2, 3), keepdim=True, correction=0)
    with torch.no_grad():
        wanted = net.eval()(v2.CenterCrop(6)((values - mean) / spread).float()).softmax(1)
    for answer, row in zip(answers, wanted, strict=True):
        found = dict(zip(answer.classes, answer.probabilities, strict=True))
        assert [found[name] for name in ("0", "1")] == pytest.approx(row.tolist(), rel=1e-4)
