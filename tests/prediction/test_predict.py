"""`widefield predict` from a folder to files: on ranks and tiles, stopped and gone on, with bad files and taken names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import DIGITS, RECIPES
from PIL import Image
from ranks import on_ranks

import widefield as wf
from widefield.cli import main
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.data.image import write_image
from widefield.plans import Plan
from widefield.prediction import session
from widefield.prediction.session import Wishes, predict_files
from widefield.run import train

PAGE = str(RECIPES / "page.yaml")
SMALL = ["mesh.space=[]", "data.options.size=[48, 40]", "data.options.pages=[6, 5]", "model.options.widths=[4, 6]",
         "schedule.length=6step", "schedule.warmup=2step", "evaluate.every=2step", "log.tensorboard=false",
         "precision=float64"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train(read_config(PAGE, SMALL), tmp_path_factory.mktemp("page") / "run", World()).run


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    """Five images, two of one stem and one of another size, in two folders."""
    place, pages = tmp_path_factory.mktemp("scans"), open_dataset(read_config(PAGE, SMALL).data).evaluate
    (place / "sub").mkdir()
    images = [pages.read(number)[0] for number in range(4)]
    for name, image in zip(("0.png", "0.tif", "1.png", "sub/1.png"), images, strict=True):
        write_image(image, place / name)
    write_image(images[0][:, :31], place / "small.png")
    return place


NAMES = ["0.png", "0.tif", "1", "small", "sub/1"]


def labels_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(Image.open(folder / f"{name}.png")) for name in NAMES}


def likely_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.load(folder / "probabilities" / f"{name}.npy") for name in NAMES}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


def on_mesh(mesh, run: Path, scans: Path, output: Path, overrides: list[str], wishes: Wishes) -> list:
    found = predict_files(run, [scans], overrides, mesh.world, output=output, wishes=wishes)
    return [found.lefts, [answer.labels for answer in found.answers]]


@pytest.fixture(scope="module")
def one_rank(trained, scans, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "out"
    wishes = Wishes(flips=True, probabilities="npy", overlays=True, batch_size=2)
    found = predict_files(trained, [scans], [], World(), output=output, wishes=wishes)
    assert found.lefts == [] and [answer.labels for answer in found.answers] == [str(output / f"{one}.png") for one in NAMES]
    return output


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides", [["mesh.replicate=2"], ["mesh.replicate=1", "mesh.space=[2,1]"], ["mesh.replicate=1", "mesh.space=[1,2]"]]
)
def test_ranks_that_share_images_or_one_image_answer_as_one_does(overrides, trained, scans, one_rank, tmp_path):
    wishes = Wishes(flips=True, probabilities="npy", overlays=True, batch_size=2)
    found = on_ranks(2, on_mesh, trained, scans, tmp_path / "out", overrides, wishes)
    assert found[0] == found[1] == [[], [str(tmp_path / f"out/{name}.png") for name in NAMES]]
    mine, alone = labels_in(tmp_path / "out"), labels_in(one_rank)
    assert all(np.array_equal(mine[name], alone[name]) for name in NAMES)
    theirs = likely_in(one_rank)
    for name, likely in likely_in(tmp_path / "out").items():
        np.testing.assert_allclose(likely, theirs[name], rtol=0, atol=1e-3)  # rounded to float16
    assert [row | {"labels": ""} for row in rows(tmp_path / "out")] == [row | {"labels": ""} for row in rows(one_rank)]


def test_flips_are_the_mean_of_the_probabilities_of_mirror_images(trained, scans, one_rank):
    from widefield.inference import single_rank

    parts, _ = single_rank(trained, None)
    parts.model.eval()
    image = torch.from_numpy(np.array(Image.open(scans / "1.png"))).double()[None, None] / 255
    mean, std = (torch.tensor(values).double().view(1, -1, 1, 1) for values in (parts.dataset.mean, parts.dataset.std))
    with torch.no_grad():
        every = [parts.model(((image - mean) / std).flip(dims)).softmax(1).flip(dims) for dims in ((), (2,), (3,), (2, 3))]
    wanted = torch.stack(every).mean(0)[0]
    assert np.array_equal(labels_in(one_rank)["1"], wanted.argmax(0).numpy())
    np.testing.assert_allclose(likely_in(one_rank)["1"], wanted.numpy(), rtol=0, atol=1e-3)  # rounded to float16


def test_tables_labels_and_overlays_have_what_they_say(trained, scans, one_rank):
    found = rows(one_rank)
    assert [Path(row["input"]).relative_to(scans) for row in found] == [
        Path(p) for p in ("0.png", "0.tif", "1.png", "small.png", "sub/1.png")
    ]
    labels = labels_in(one_rank)
    for row, name in zip(found, NAMES, strict=True):
        assert float(row["share of background"]) == pytest.approx((labels[name] == 0).mean(), abs=1e-6)
        assert sum(float(row[key]) for key in row if key.startswith("share")) == pytest.approx(1, abs=1e-5)
        over = np.asarray(Image.open(one_rank / f"overlays/{name}.png"))
        assert over.shape == (*labels[name].shape, 3)
    image = np.asarray(Image.open(scans / "1.png"))
    over, where = np.asarray(Image.open(one_rank / "overlays/1.png")), labels["1"] == 0
    assert (over[where] == image[where][:, None]).all() and (~where).any() and (over[~where] != image[~where][:, None]).any()
    tree = json.loads((one_rank / "predictions.json").read_text())
    assert tree["labels"] == "pixels" and len(tree["predictions"]) == 5 and tree["flips"] is True
    with Image.open(one_rank / "1.png") as palette:
        assert palette.mode == "P"


def test_tables_name_files_as_they_were_given(trained, scans, tmp_path, monkeypatch):
    monkeypatch.chdir(scans.parent)
    given = [scans.name, f"./{scans.name}/../{scans.name}/1.png"]  # the second is a file of the first
    predict_files(trained, given, [], World(), output=tmp_path)
    wanted = [f"{scans.name}/{name}" for name in ("0.png", "0.tif", "1.png", "small.png", "sub/1.png")]
    assert [row["input"] for row in rows(tmp_path)] == wanted
    tree = json.loads((tmp_path / "predictions.json").read_text())
    assert [one["input"] for one in tree["predictions"]] == wanted
    assert predict_files(trained, [scans], [], World(), output=tmp_path).earlier == 5  # the same files
    assert [row["input"] for row in rows(tmp_path)] == wanted


def test_a_command_that_was_stopped_goes_on_where_it_was(trained, scans, tmp_path, monkeypatch):
    asked, real = [], session.Asker.__call__

    def counting(self, images, paths):
        asked.extend(paths)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(self, images, paths)

    monkeypatch.setattr(session.Asker, "__call__", counting)
    with pytest.raises(KeyboardInterrupt):
        predict_files(trained, [scans], [], World(), output=tmp_path / "out")
    with (tmp_path / "out/.predictions/done_0.jsonl").open("a") as file:
        file.write('{"input": "torn')
    (tmp_path / "out/1.png").write_bytes(b"half")  # planned, so it is ours
    asked.append("")
    found = predict_files(trained, [scans], [], World(), output=tmp_path / "out")
    assert found.earlier == 2 and len(asked) == 4 + 3 and len(found.answers) == 5
    predict_files(trained, [scans], [], World(), output=tmp_path / "whole")
    mine, whole = labels_in(tmp_path / "out"), labels_in(tmp_path / "whole")
    assert all(np.array_equal(mine[name], whole[name]) for name in NAMES)
    assert predict_files(trained, [scans], [], World(), output=tmp_path / "out").earlier == 5
    with pytest.raises(ValueError, match="has predictions with flips=False, and now it is True; add --overwrite"):
        predict_files(trained, [scans], [], World(), output=tmp_path / "out", wishes=Wishes(flips=True))
    again = predict_files(trained, [scans], [], World(), output=tmp_path / "out", wishes=Wishes(flips=True, overwrite=True))
    assert again.earlier == 0 and len(rows(tmp_path / "out")) == 5


@pytest.mark.parametrize("name", ["1.png", "overlays/1.png", "predictions.csv"])
def test_files_of_others_are_never_overwritten(name, trained, scans, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"{name} is there and was not written by a prediction, so it is not overwritten"):
            predict_files(trained, [scans], [], World(), output=tmp_path, wishes=Wishes(overlays=True, overwrite=overwrite))
    assert (tmp_path / name).read_text() == "mine" and not (tmp_path / ".predictions").exists()


def test_a_folder_of_answers_that_is_a_file_is_refused(trained, scans, tmp_path, capsys):
    (tmp_path / "file").touch()
    for output, told in (("file", "is a file; name a folder"), ("file/below", "cannot be written to")):
        assert main(["predict", str(trained), str(scans), "--output", str(tmp_path / output)]) == 2
        assert told in capsys.readouterr().err


def test_a_bad_file_is_named_at_the_end_and_stops_no_other(trained, scans, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    words = [str(word) for word in (tmp_path / "bad.png", scans, tmp_path / "nowhere.png")]
    assert main(["predict", str(trained), *words, "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.out == f"5 answered: {tmp_path / 'out/predictions.csv'}\n"
    assert said.err.splitlines()[-3:] == [
        "widefield: 2 left out:",
        f"  {tmp_path / 'nowhere.png'}: there is no such file or folder",
        f"  {tmp_path / 'bad.png'}: cannot read the image {tmp_path / 'bad.png'} (8 bytes; cannot identify image file "
        f"'{tmp_path / 'bad.png'}')",
    ]
    assert len(rows(tmp_path / "out")) == 5
    with pytest.raises(ValueError, match="cannot read the image .*bad.png"):
        wf.predict(trained, words[:1], output=tmp_path / "other")


def test_an_image_that_the_model_fails_for_is_left_out_of_its_batch(trained, scans, tmp_path, monkeypatch):
    real = session.Asker.__call__

    def failing(self, images, paths):
        if any(path.endswith("0.tif") for path in paths):
            raise RuntimeError("no such size")
        return real(self, images, paths)

    monkeypatch.setattr(session.Asker, "__call__", failing)
    found = predict_files(trained, [scans], [], World(), output=tmp_path, wishes=Wishes(batch_size=4))
    assert len(found.answers) == 4
    assert [left.reason for left in found.lefts] == ["the model fails for it: RuntimeError: no such size"]


def test_python_gets_the_pixels_and_writes_no_file(trained, scans, one_rank):
    before = sorted(scans.rglob("*"))
    answers = wf.predict(trained, [scans / "1.png", scans / "small.png"], flips=True, probabilities="npy", batch_size=2)
    for answer, name in zip(answers, ("1", "small"), strict=True):
        assert np.array_equal(answer.pixels.numpy(), labels_in(one_rank)[name]) and answer.labels is None
        assert np.array_equal(answer.probabilities_of_pixels.numpy(), likely_in(one_rank)[name])
    assert sorted(scans.rglob("*")) == before
    filed = wf.predict(trained, scans, flips=True, probabilities="npy", overlays=True, output=one_rank)
    assert [answer.labels for answer in filed] == [str(one_rank / f"{name}.png") for name in NAMES]


# ---------------------------------------------------------------------------------------------- labels of images


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    settings = ["schedule.length=6step", "schedule.warmup=0step", "evaluate.every=2step", "checkpoint.every=2step",
                "checkpoint.keep_last=9", "log.tensorboard=false", "mesh.replicate=1"]  # fmt: skip
    return train(read_config(DIGITS, settings), tmp_path_factory.mktemp("digits") / "run", World()).run


@pytest.fixture
def pictures(tmp_path) -> Path:
    images = open_dataset(read_config(DIGITS).data).evaluate
    (tmp_path / "pictures").mkdir()
    for number in range(5):
        write_image(images.read(number)[0], tmp_path / f"pictures/{number}.png")
    return tmp_path / "pictures"


def test_classes_go_to_tables_or_to_the_terminal(digits, pictures, tmp_path, capsys):
    assert main(["predict", str(digits), str(pictures), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith(str(pictures / "0.png")) and lines[0].count(" %") == 2
    assert not (digits / "predictions").exists()
    arguments = ["--output", str(tmp_path / "out"), "--top", "2", "--batch-size", "4", "mesh.replicate=1"]
    assert main(["predict", str(digits), str(pictures / "*.png"), *arguments]) == 0
    answers = wf.predict(digits, pictures, top=2, output=tmp_path / "out")
    for row, answer in zip(rows(tmp_path / "out"), answers, strict=True):
        assert [row["class"], row["class_2"]] == answer.classes
        assert float(row["probability"]) == pytest.approx(answer.probabilities[0], rel=1e-5)
    assert "5 answered: " in capsys.readouterr().out
    assert main(["predict", str(digits), str(pictures), "--overlays"]) == 2
    assert "--overlays writes what the model says of every pixel" in capsys.readouterr().err


def test_weights_are_chosen_by_name(digits, pictures, capsys):
    said = {}
    for which in ("best", "last", "2", str(digits / "weights.safetensors")):
        assert main(["predict", str(digits), str(pictures / "0.png"), "--weights", which, "--top", "10"]) == 0
        said[which] = capsys.readouterr()
    assert "weights: best.safetensors (top1 " in said["best"].err and "weights: weights.safetensors" in said["last"].err
    assert said["last"].out == said[str(digits / "weights.safetensors")].out != said["2"].out
    assert main(["predict", str(digits), str(pictures / "0.png"), "--top", "10"]) == 0
    assert capsys.readouterr().out == said["best"].out
    for which, told in (
        ("7", "has no checkpoint of step 7; it has 2, 4, 6"),
        ("bes", "there are no weights at bes; write best"),
    ):
        assert main(["evaluate", str(digits), "--weights", which, "mesh.replicate=1"]) == 2
        assert told in capsys.readouterr().err
    assert main(["evaluate", str(digits), "mesh.replicate=1", "--weights", "2"]) == 0
    told = json.loads((digits / "record.jsonl").read_text().splitlines()[1 + 2])
    assert told["kind"] == "evaluation" and f"{told['metrics']['top1']:.2f} % top-1" in capsys.readouterr().out


def test_a_plan_of_the_run_does_not_bind_its_predictions():
    """A mesh of training with two ranks has nothing to say where one image is asked about."""
    from widefield.config.recipe import on_mesh_of
    from widefield.plans import plan_of

    config = read_config(PAGE, on_mesh_of([], alone=True))
    assert plan_of(config, 1) == Plan(stream=config.stream)
