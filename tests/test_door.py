"""The public door: its names, the command's verbs as functions, one's own objects, and the package's example on ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from command import DIGITS, assert_same, fingerprint, forget_after, losses, record
from PIL import Image
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import widefield as wf
from widefield import cli
from widefield.comm.mesh import AgreedError, World
from widefield.config import config_of, parse_config, read_config
from widefield.data.image import write_image
from widefield.run import train as run_train
from widefield.tasks.classification import Classification


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(wf, name).__name__ == name for name in wf.__all__)
    assert set(wf.__all__) <= set(dir(wf))
    with pytest.raises(AttributeError, match="widefield has no 'tiles'; it has: Mesh"):
        wf.tiles  # noqa: B018


@pytest.mark.parametrize("name", ["train", "evaluate", "predict", "plan"])
def test_no_module_has_the_name_of_a_function_of_the_door(name):
    assert importlib.util.find_spec(f"widefield.{name}") is None and getattr(wf, name).__module__ == "widefield.api"


def test_importing_the_package_imports_no_torch():
    code = "import sys, widefield; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 5)]
    return nn.Sequential(*layers).double()


def gradients_through_the_door(mesh_of_the_test, image, target, cut):
    mesh = wf.build_mesh()
    model = wf.parallelize(net(), mesh)
    own = slice(cut[mesh.rank], cut[mesh.rank + 1])
    loss = F.cross_entropy(model(image[own]), target[own], reduction="sum") * mesh.size / len(image)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("cut", [(0, 4, 7), (0, 1, 6, 7)])
def test_gradients_are_the_whole_batch_s_on_every_rank(cut):
    image, target = torch.randn(7, 3, 5, 5, dtype=torch.float64), torch.randint(5, (7,))
    alone = wf.parallelize(net(), wf.build_mesh())
    F.cross_entropy(alone(image), target).backward()
    for found in on_ranks(len(cut) - 1, gradients_through_the_door, image, target, cut):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("space", [(1,), (1, 1), (1, 1, 1)])
def test_a_grid_of_one_tile_is_no_grid(space):
    image, mesh = torch.randn(2, 3, 5, 5, dtype=torch.float64), wf.build_mesh(space=space)
    assert wf.tile(image, mesh) is image and wf.from_tile(image, mesh, image.shape) is image
    assert mesh.plan == wf.build_mesh().plan and mesh.grid == wf.build_mesh().grid


def refusal(mesh_of_the_test):
    with pytest.raises(ValueError, match="needs 3 ranks and there are 2; set mesh.replicate=2"):
        wf.build_mesh(replicate=3)
    with pytest.raises(ValueError, match="needs 3 ranks and there are 2; start a multiple of 3 ranks"):
        wf.build_mesh(shard=3)


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank():
    on_ranks(2, refusal)


# ---------------------------------------------------------------------------------------------- the verbs

SHORT = ["schedule.length=4step", "schedule.warmup=0step", "evaluate.every=1000step", "log.tensorboard=false"]
QUICK = {
    "data": {"batch_size": 8, "workers": 0},
    "optimizer": {"lr": 0.05},
    "schedule": {"length": "5step"},
    "evaluate": {"every": "1000step"},
    "log": {"tensorboard": False},
    "precision": "float64",
}


@pytest.mark.long
def test_train_does_what_the_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # so that the name is found in the package
    run_train(read_config(DIGITS, SHORT), tmp_path / "command", World())
    outcome = wf.train("digits", *SHORT, run="door")
    assert fingerprint(tmp_path / "door", ranks=1) == fingerprint(tmp_path / "command", ranks=1)
    assert (outcome.run, outcome.status, outcome.reason, outcome.step) == (Path("door"), 0, "complete", 4)
    assert outcome.evaluation.of == 360 and wf.evaluate("door").metrics == outcome.evaluation.metrics
    assert "pictures" not in repr(outcome) and "mistakes" not in repr(outcome)
    again = wf.train("digits", *SHORT, "schedule.length=5step", run="door")
    assert (again.step, record(tmp_path / "door", "start")[-1]["resumed_from"]) == (5, 4)


def test_a_run_without_a_folder_gets_a_numbered_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(wf.train("digits", *SHORT, "schedule.length=1step").run) for _ in range(2)] == ["runs/0001", "runs/0002"]


def test_a_config_is_a_path_a_name_a_dict_or_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = read_config(DIGITS, ["mesh.replicate=2", "seed=3"])
    values = yaml.safe_load(Path(DIGITS).read_text().replace("5.0e-4", "0.0005"))
    shutil.copy(DIGITS, "mine.yaml")
    for config in ("digits", "mine.yaml", Path("mine.yaml"), values, read_config(DIGITS), wanted):
        assert wf.plan(config, "mesh.replicate=2", "seed=3") == wf.plan(wanted)
    assert config_of(values, ["mesh.replicate=2", "seed=3"]) == wanted
    assert config_of(
        {"model": {"name": "resnet"}, "data": {"name": "digits", "hold_out": 1e-3, "path": "1e-3"}}
    ) == parse_config("model: {name: resnet}\ndata: {name: digits, hold_out: 0.001, path: '1e-3'}")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            "digit",
            r"no recipe at digit; did you mean 'digits'\? Packaged ones are: digits, digits_gan, digits_views, imagefolder, "
            "manifest, masks, page, page_detection, page_restoration, page_streamed",
        ),
        ("nowhere/digits.yaml", "no recipe at nowhere/digits.yaml"),
        (3, "the config is a int; give the path of a recipe, the name of a packaged one, a dict or a RunConfig"),
        ({"model": {"nam": "resnet"}, "data": {"name": "digits"}}, "unknown key 'model.nam'; did you mean 'name'"),
        ({"data": {"name": "digits"}}, "'model' is missing"),
        ({"model": {"name": nn.Identity}}, "the config holds <class '.*Identity'>, a type; give texts, numbers"),
    ],
)
def test_a_config_that_is_none_is_refused(config, told):
    with pytest.raises(ValueError, match=told):
        wf.plan(config)


def test_recipes_are_found_where_only_the_package_is_installed(tmp_path):
    root = Path(__file__).parents[1]
    shutil.copytree(root / "widefield", tmp_path / "site" / "widefield", ignore=shutil.ignore_patterns("__pycache__"))
    text = (root / "pyproject.toml").read_text()
    assert '[tool.hatch.build.targets.wheel.force-include]\nrecipes = "widefield/recipes"\n' in text
    shutil.copytree(root / "recipes", tmp_path / "site" / "widefield" / "recipes")
    code = "from widefield.config import read_config; print(read_config('page').data.name)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("page\n", 0), done.stderr


def test_a_plan_is_checked_and_says_itself_in_words():
    assert str(wf.plan("page", "mesh.replicate=2", "data.batch_size=2")) == "replicate=2 x space=[2, 1]"
    assert str(wf.plan("digits", ranks=4)) == "replicate=4" and isinstance(wf.plan("digits"), wf.Plan)
    assert wf.plan("digits", "mesh.shard=4").ranks == 4
    with pytest.raises(ValueError, match=r"the mesh \(replicate 2\) needs 2 ranks and there are 3; set mesh.replicate=3"):
        wf.plan("digits", "mesh.replicate=2", ranks=3)
    with pytest.raises(ValueError, match="share a batch of 2 samples"):
        wf.plan("digits", "data.batch_size=2", ranks=4)
    with pytest.raises(NotImplementedError, match="mesh.channel=2 runs a model's operations on parts of channels and stream"):
        wf.plan("page_streamed", "mesh.channel=2")


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_ranks_that_there_are_not_are_asked_for_in_words(call, tmp_path):
    """The command starts ranks; a function in a process of the user's cannot."""
    folder = tmp_path / "run"
    wf.train("digits", *SHORT, "schedule.length=1step", run=folder)
    arguments = {"train": ["digits", *SHORT], "evaluate": [folder]}[call]
    told = rf"the mesh \(replicate=2\) needs 2 ranks, and this script runs on one; wf.{call} starts none.*nproc-per-node 2"
    with pytest.raises(ValueError, match=told + ".* or set mesh.replicate=1, or use the command"):
        getattr(wf, call)(*arguments, "mesh.replicate=2")
    with pytest.raises(ValueError, match=r"set mesh.shard=1 mesh.space=\[\]"):
        getattr(wf, call)(*arguments, "mesh.shard=2", "mesh.space=[2,1]")


def test_answers_of_files_pictures_and_tensors_are_the_same(tmp_path):
    folder = wf.train("digits", *SHORT, run=tmp_path / "run").run
    pixels = torch.randint(256, (1, 8, 8), dtype=torch.uint8)
    write_image(pixels, tmp_path / "scan.png")
    (one,) = wf.predict(folder, tmp_path / "scan.png", top=10)
    answers = wf.predict(folder, [str(tmp_path / "scan.png"), pixels, Image.open(tmp_path / "scan.png")], top=10)
    assert [answer.probabilities for answer in answers] == [one.probabilities] * 3 and len(one.classes) == 10
    assert [answer.path for answer in answers[1:]] == ["image 1", "image 2"]
    assert wf.predict(folder, pixels)[0].classes == one.classes[:3]
    for image, told in (
        (pixels.float(), "image 0 has 1 channels of floating-point numbers and this run was trained on 1 of uint8 ones"),
        (pixels.expand(3, 8, 8), "image 0 has 3 channels of uint8 numbers and this run was trained on 1 of uint8"),
        (3, "image 0 has a int for an image"),
    ):
        with pytest.raises(ValueError, match=told):
            wf.predict(folder, [image])


# ---------------------------------------------------------------------------------------------- one's own objects


class Patches(Dataset):
    """Images of 3 x 9 x 10 pixels in three classes of brightness; `kind` says as what."""

    classes = ["dark", "grey", "light"]

    def __init__(self, count: int, kind: str = "uint8") -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(80, (3, 9, 10), generator=generator, dtype=torch.uint8) + 80 * (index % 3)
        if self.kind == "drawn":  # augmentation of its own, from each of the three generators
            image = image // (1 + torch.randint(2, ()).item() + random.randrange(2)) + np.random.randint(9)
        if self.kind == "float":
            return image / 127.5 - 1, torch.tensor(index % 3)
        if self.kind == "pil":
            return Image.fromarray(image.permute(1, 2, 0).numpy()), np.int64(index % 3)
        if self.kind == "mask":
            return image, (image[0] > 120).to(torch.uint8) + (image[1] > 120)
        return image, index % 3


def own_net(pixels: bool = False) -> nn.Module:
    torch.manual_seed(5)
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.ReLU()]
    head = [nn.Conv2d(5, 3, 1)] if pixels else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(5, 3)]
    return nn.Sequential(*body, *head)


def own_run(folder: Path, kind: str = "uint8", *settings: str, counts: tuple[int, int] = (27, 11), **options) -> wf.Plan:
    """A run of the objects above; the outcome, and the net that was passed."""
    model = own_net(pixels=kind == "mask")
    data = [Patches(count, kind) for count in counts]
    options = {"task": "segmentation"} | options if kind == "mask" else options
    return wf.train(QUICK, *settings, run=folder, model=model, data=data, **options), model


def own_run_on_ranks(mesh, folder: Path, kind: str, *settings: str):
    outcome, model = own_run(folder, kind, *settings)
    return outcome.evaluation.metrics, [value.clone() for value in model.state_dict().values()]


SETTINGS_OF = {
    "uint8": ["data.augment=[RandomHorizontalFlip, {ColorJitter: {brightness: 0.5}}]", "data.mean=[0.5]", "data.std=[0.2]"],
    "float": ["data.mixup=0.4"],
    "pil": ["data.read=[{RandomCrop: {size: [8, 8]}}]", "data.read_evaluate=[{CenterCrop: {size: [8, 8]}}]"],
    "drawn": ["task.metrics=[{MulticlassF1Score: {average: macro}}]"],
    "mask": [],
}


@pytest.mark.parametrize("kind", SETTINGS_OF)
def test_own_objects_give_the_same_numbers_on_two_ranks(kind, tmp_path):
    outcome, model = own_run(tmp_path / "one", kind, *SETTINGS_OF[kind])
    for metrics, weights in on_ranks(2, own_run_on_ranks, tmp_path / "two", kind, *SETTINGS_OF[kind]):
        assert metrics == pytest.approx(outcome.evaluation.metrics, rel=1e-6)  # torchmetrics' states are float32
        for got, wanted in zip(weights, model.state_dict().values(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)  # the nets that were passed are float32
    assert_same(tmp_path / "two", tmp_path / "one")
    assert (outcome.evaluation.images, outcome.evaluation.of, outcome.evaluation.duplicates) == (11, 11, 0)


def test_own_masks_are_the_same_on_tiles(tmp_path):
    own_run(tmp_path / "one", "mask")
    on_ranks(2, own_run_on_ranks, tmp_path / "two", "mask", "mesh.replicate=1", "mesh.space=[2,1]", plan=wf.Plan(space=[2, 1]))
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(("plan", "settings"), [
    (wf.Plan(shard=2), ["mesh.shard=2"]), (wf.Plan(channel=2), ["mesh.channel=2", "mesh.replicate=1"]),
])  # fmt: skip
def test_own_objects_run_where_ranks_hold_parts_of_the_model(plan, settings, tmp_path):
    own_run(tmp_path / "one", "uint8")
    on_ranks(2, own_run_on_ranks, tmp_path / "two", "uint8", *settings, plan=plan)
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_of_own_objects_goes_on_in_mid_epoch_bit_for_bit(workers, tmp_path):
    """27 images in batches of 8 are 4 steps an epoch; the run is cut after step 2 and ends in the second epoch."""
    own_run(tmp_path / "whole", "drawn")
    often = ["checkpoint.every=1step", "checkpoint.keep_last=100"]
    own_run(tmp_path / "cut", "drawn", f"data.workers={workers}", *often)
    forget_after(tmp_path / "cut", 2)
    outcome, _ = own_run(tmp_path / "cut", "drawn", f"data.workers={workers}")
    assert outcome.step == 5 and record(tmp_path / "cut", "start")[-1]["resumed_from"] == 2
    assert fingerprint(tmp_path / "cut", ranks=1) == fingerprint(tmp_path / "whole", ranks=1)


def test_a_model_that_was_passed_is_trained_as_a_copy_and_gets_the_weights(tmp_path):
    before = own_net().state_dict()
    outcome, model = own_run(tmp_path / "run", "uint8")
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == before[name].dtype for name, value in model.state_dict().items()) and model.training
    fresh = own_net()
    evaluation = wf.evaluate(outcome.run, model=fresh, data=Patches(11))
    assert evaluation.metrics == outcome.evaluation.metrics and evaluation.loss == outcome.evaluation.loss
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def begun_otherwise(mesh, folder: Path):
    torch.manual_seed(100 + mesh.rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(270, 3))
    data = [Patches(9), Patches(5)]
    wf.train(QUICK, "optimizer.lr=1e-12", run=folder, model=model, data=data)
    return model[1].weight.detach().clone()


def test_ranks_begin_with_the_weights_of_the_first(tmp_path):
    first, second = on_ranks(2, begun_otherwise, tmp_path / "run")
    torch.manual_seed(100)
    expected = nn.Sequential(nn.Flatten(), nn.Linear(270, 3))[1].weight
    assert torch.equal(first, second) and torch.allclose(first, expected, atol=1e-6)


def differing(mesh, folder: Path, what: str) -> str:
    model = nn.Sequential(nn.Flatten(), nn.Linear(270, 3 + (what == "model" and mesh.rank)))
    train = Patches(9 + (what == "data" and mesh.rank))
    with pytest.raises(AgreedError) as caught:
        wf.train(QUICK, run=folder, model=model, data=(train, Patches(5)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("data", "ranks were given different datasets: images to train on: 10 on rank 1 and 9 on rank 0; open the same data"),
        (
            "model",
            "ranks were given different models: 1.weight: (4, 270) torch.float64 on rank 1 and (3, 270) torch.float64 on",
        ),
    ],
)
def test_ranks_that_were_given_different_objects_are_refused_together(what, told, tmp_path):
    for said in on_ranks(2, differing, tmp_path / "run", what):
        assert said.startswith(told)


def unreadable_on_one(mesh, folder: Path) -> str:
    evaluation = Patches(5) if mesh.rank == 0 else Subset(Patches(5), [])
    with pytest.raises(AgreedError) as caught:
        wf.train(QUICK, run=folder, model=own_net(), data=(Patches(9), evaluation))
    return str(caught.value)


def test_a_dataset_that_one_rank_lacks_ends_all_of_them_in_the_same_words(tmp_path):
    for said in on_ranks(2, unreadable_on_one, tmp_path / "run"):
        assert said == "rank 1: the dataset to evaluate, a Subset, has 0 samples; give one with at least 1"


def test_a_run_folder_tells_what_was_passed(tmp_path):
    outcome, model = own_run(tmp_path / "run", "float")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model"]["name"] == "<torch.nn.modules.container.Sequential>"
    assert config["data"]["name"] == f"<{Patches.__module__}.Patches>" and config["data"]["batch_size"] == 8
    told = record(tmp_path / "run", "start")[0]["objects"]
    assert told["model"]["parameters"] == sum(p.numel() for p in model.parameters()) and "Linear" in told["model"]["text"]
    assert (told["data"]["train"]["samples"], told["data"]["evaluate"]["samples"]) == (27, 11)
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    assert (about["classes"], about["image"], about["pixels"]) == (Patches.classes, [3, 9, 10], "(value - mean) / std")
    reasons = record(tmp_path / "run", "start")[0]["reasons"]
    assert any("pixels are taken as the dataset gives them, for nothing else was asked" in reason for reason in reasons)
    assert wf.write_report(tmp_path / "run").is_file() and cli.main(["report", str(tmp_path / "run")]) == 0
    assert outcome.evaluation.pictures[0].image.dtype == torch.uint8


def test_what_was_passed_is_asked_for_again(tmp_path, capsys):
    folder = own_run(tmp_path / "run", "float")[0].run
    words = "is '<torch.nn.modules.container.Sequential>', an object that a Python program passed"
    with pytest.raises(AgreedError, match="data.name is '<.*Patches>', an object.*wf.evaluate\\(run, data=...\\)"):
        wf.evaluate(folder, model=own_net())
    with pytest.raises(AgreedError, match=f"model.name {words}.*pass it again, as wf.evaluate\\(run, model=...\\)"):
        wf.evaluate(folder, data=Patches(11, "float"))
    with pytest.raises(ValueError, match=f"model.name {words}"):
        wf.predict(folder, torch.zeros(3, 9, 10))
    for verb in (["evaluate", folder], ["export", folder], ["train", folder / "config.yaml", "--run", folder]):
        assert cli.main([str(word) for word in verb]) == 2
        assert "an object that a Python program passed" in capsys.readouterr().err
    image, _ = Patches(11, "float")[4]
    (answer,) = wf.predict(folder, image, model=own_net(), top=1)
    assert answer.classes[0] in Patches.classes and answer.labels is None
    Image.new("RGB", (10, 9)).save(tmp_path / "scan.png")
    with pytest.raises(ValueError, match=r"scan.png is a file, and this run was trained on floating-point tensors"):
        wf.predict(folder, tmp_path / "scan.png", model=own_net())


def test_a_tensor_that_every_pixel_of_is_answered_for_keeps_the_answer(tmp_path):
    folder = own_run(tmp_path / "run", "mask")[0].run
    (answer,) = wf.predict(folder, Patches(1, "mask")[0][0], model=own_net(pixels=True))
    assert answer.pixels.shape == (9, 10) and answer.labels is None and sum(answer.probabilities) == pytest.approx(1)


def test_objects_take_the_place_of_what_a_recipe_names(tmp_path):
    """The rest of a recipe's sections stays: its batch size, its augmentation."""
    train = TensorDataset(torch.randint(256, (20, 1, 8, 8), dtype=torch.uint8), torch.arange(20) % 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    outcome = wf.train("digits", *SHORT, run=tmp_path / "run", model=net, data=(train, train), classes=4)
    config = read_config(tmp_path / "run" / "config.yaml")
    assert config.model.options == {} and config.data.augment and outcome.evaluation.of == 20
    assert config.task.options == {"label_smoothing": 0.05}


# ---------------------------------------------------------------------------------------------- one's own task


@dataclass(frozen=True)
class Squared(Classification):
    """Least squares of probabilities."""

    headline: str = "right"

    def loss_sum(self, output, target):
        return (output.softmax(1) - F.one_hot(target, self.num_classes)).square().sum()

    def loss_each(self, output, target):
        return (output.softmax(1) - F.one_hot(target, self.num_classes)).square().sum(1)

    def metrics(self):
        return MetricCollection({"right": MulticlassAccuracy(self.num_classes, average="micro")})

    def sentence(self, values):
        return f"{values['right']:.1f} % right"


def squared_on_ranks(mesh, folder: Path) -> str:
    return own_run(folder, "uint8", task=Squared(3))[0].evaluation.sentence


def test_a_task_may_be_passed(tmp_path):
    outcome, _ = own_run(tmp_path / "one", "uint8", task=Squared(3))
    assert outcome.evaluation.sentence.endswith(" % right on 11/11 images")
    assert on_ranks(2, squared_on_ranks, tmp_path / "two") == [outcome.evaluation.sentence] * 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    with pytest.raises(AgreedError, match="task.name is '<.*Squared>', an object"):
        wf.evaluate(tmp_path / "one", model=own_net(), data=Patches(11))
    again = wf.evaluate(tmp_path / "one", model=own_net(), data=Patches(11), task=Squared(3))
    assert again.sentence == outcome.evaluation.sentence


# ---------------------------------------------------------------------------------------------- refusals


class Held(Classification):
    """A task with these metrics."""

    def __init__(self, held) -> None:
        super().__init__(3)
        object.__setattr__(self, "held", held)

    def metrics(self):
        return MetricCollection(self.held, compute_groups=False) if isinstance(self.held, dict) else self.held


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


class Bare(Patches):
    classes = None


def labelled(image, target) -> list:
    return [(image, target)] * 2


def flat(values: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(values, 2))


IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        ({"data": Patches(9)}, r"data is a Patches; pass two datasets: data=\(train_set, evaluation_set\)"),
        ({"data": (Patches(9), Patches(0))}, "the dataset to evaluate, a Patches, has 0 samples; give one with at least 1"),
        ({"data": (Endless(), Patches(5))}, "the dataset to train on is a Endless, which has no numbered samples: it gives"),
        ({"data": (3, Patches(5))}, "the dataset to train on is a int, which has no numbered samples"),
        ({"data": (DataLoader(Patches(9)), Patches(5))}, "the dataset to train on is a DataLoader; give its dataset"),
        ({"data": (Bare(9), Patches(5))}, "the classes are not known: give names or their number, as classes="),
        ({"data": (Patches(9), Patches(5)), "classes": "cat"}, "the classes are 'cat': give names or their number"),
        ({"data": (Patches(9), Patches(5)), "classes": 2, "model": flat(270)}, r"the label of train\[\d+\] is 2, outside 0..1"),
        ({"data": (Patches(9), Patches(5, "float"))}, "the two datasets differ: uint8 images of 3 channels .* and floating"),
        ({"data": (Patches(9, "mask"), Patches(5, "mask"))},
         "learns one class number per image and data.name=<.*Patches> has one per pixel; set task.name=segmentation"),
        ({"data": (Patches(9), Patches(5)), "task": "segmentation"}, "task.name=segmentation learns one per pixel and data"),
        ({"data": [labelled(IMAGE[0], 1)] * 2, "classes": 2}, r"train\[0\] has an image of shape \(4, 4\); \(C, H, W\) is"),
        ({"data": [labelled(IMAGE.int(), 1)] * 2, "classes": 2}, "has an image of torch.int32; uint8 from 0 to 255, uint16"),
        ({"data": [labelled(IMAGE.numpy(), 1)] * 2, "classes": 2}, "has a ndarray for an image; a tensor .* or a PIL image"),
        ({"data": [labelled(IMAGE, 0.5)] * 2, "classes": 2}, "per image and data.name=<.*list> has numbers per image"),
        ({"data": [labelled(IMAGE, "cat")] * 2, "classes": 2}, "has the label 'cat'; a class number"),
        ({"data": [labelled(IMAGE, torch.zeros(3).int())] * 2, "classes": 2}, "has any number of classes per image"),
        ({"data": [[IMAGE] * 2] * 2, "classes": 2}, r"train\[0\] is a Tensor; a pair is wanted: an image and its class number"),
        ({"data": [[(IMAGE, 1, 2)] * 2] * 2, "classes": 2}, r"train\[0\] is a tuple of 3; a pair is wanted"),
        ({"data": [[(IMAGE, 1), (IMAGE[:1], 1)]] * 2, "classes": 2, "model": flat(48)},
         r"train\[1\] differs from the first image: channels: 1, there 3"),
        ({"data": [[(IMAGE, 1), (IMAGE[:, 1:], 1)]] * 2, "classes": 2, "model": flat(48)},
         r"images of one batch differ in size .* is \(3, 3, 4\)"),
        ({"data": [labelled(IMAGE, torch.zeros(2, 4).long())] * 2, "classes": 2, "task": "segmentation"},
         r"the labels of train\[0\] are 2 x 4 pixels and its image is 4 x 4; mend one of them"),
        ({"model": "resnet"}, "model is a str; pass a torch.nn.Module, or name what makes one: model.name=package.module"),
        ({"model": nn.DataParallel(nn.Identity())}, "the model is wrapped in DataParallel; pass the plain module"),
        ({"model": own_net().eval()}, "the model is in evaluation mode, .*; call model.train\\(\\) first"),
        ({"model": nn.Sequential(nn.LazyConv2d(3, 3))}, "'0.weight' of the model is lazy: it has no shape yet; run one image"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(270, 4))}, r"wants an output of shape \(\d, 3\) and the model gave"),
        ({"task": 3}, r"task=<builtins.int> gives a int, which lacks loss_sum; an object with loss_sum, count"),
        ({"task": Classification}, "gives the class Classification; an object with loss_sum"),
        ({"task": Squared(3, headline="top1")}, "says that its result is 'top1' and its metrics give right; let headline name"),
        ({"task": Held({"kept": CatMetric()})}, "the state 'value' of CatMetric, of task=<.*Held>, does not add up over ranks"),
        ({"task": Held([MulticlassAccuracy(3)])}, "the metrics of task=<.*Held> are a list; a torchmetrics.MetricCollection"),
        ({"task": Held({"right": MulticlassAccuracy(4, top_k=4)})}, "cannot be updated with answers of"),
        ({"task": "segmantation"}, "did you mean 'segmentation'"),
        ({"classes": 3, "data": None}, "classes are those of data, and data is not passed; leave classes out"),
    ],
)  # fmt: skip
def test_objects_that_do_not_fit_are_refused_in_words(passed, told, tmp_path):
    given = {"model": own_net(), "data": (Patches(9), Patches(5))} | passed
    with pytest.raises((ValueError, NotImplementedError), match=told):
        wf.train(QUICK, run=tmp_path / "run", **given)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("model.name=resnet", "model.name=resnet and model=<.*Sequential> say two things of model; leave one of them out"),
        ("model.options={width: 3}", "say two things of model"),
        ("data.path=photos", "data.path=photos and data=<.*Patches> say two things of data"),
        ("data={name: digits}", "say two things of data"),
        (
            "data.augment=[RandomEqualize]",
            "data.augment has RandomEqualize, which changes uint8 images, and those of data.name=<.*Patches> are float",
        ),
        ("data.mean=[0.1, 0.2]", "data.mean has 2 numbers and the images have 3 channels"),
    ],
)
def test_settings_that_do_not_fit_objects_are_refused_in_words(setting, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        own_run(tmp_path / "run", "float", setting)
    with pytest.raises(ValueError, match="3 is no override; write texts"):
        wf.plan("digits", 3) if setting.startswith("data.mean") else wf.train("digits", 3)


class Historic(nn.Module):
    """Holds a tensor that cannot be copied: it has a history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = self.layer.weight * 2


def test_a_model_that_cannot_be_copied_is_refused(tmp_path):
    with pytest.raises(AgreedError, match=r"the model <.*Historic> cannot be copied \(RuntimeError: .*name what makes it"):
        wf.train(QUICK, run=tmp_path / "run", model=Historic(), data=(Patches(9), Patches(5)))


class Torn(Patches):
    """Image 2 lies in a file that cannot be read; image 3 finds a mistake in the dataset's own code."""

    def __getitem__(self, index: int):
        if index == 2:
            raise OSError("truncated file")
        return super().__getitem__(index) if index != 3 else {}["no such key"]


def test_an_image_of_ones_own_that_cannot_be_read_is_named_or_left_out(tmp_path):
    data = (Subset(Torn(9), [0, 1, 2, 4, 5]), Subset(Torn(9), [0, 1, 2]))
    with pytest.raises(AgreedError, match=r"cannot read the image train\[2\] \(truncated file\); mend .* data.bad_images=skip"):
        wf.train(QUICK, run=tmp_path / "stop", model=own_net(), data=data, classes=3)
    outcome = wf.train(QUICK, "data.bad_images=skip", run=tmp_path / "skip", model=own_net(), data=data, classes=3)
    assert outcome.evaluation.sentence.endswith("on 2/3 images, 1 unreadable left out")
    with pytest.raises(AgreedError, match="KeyError: 'no such key'"):
        wf.train(QUICK, run=tmp_path / "bug", model=own_net(), data=(Subset(Torn(9), [0, 3, 4]), Patches(3)), classes=3)


# ---------------------------------------------------------------------------------------------- a script on ranks

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import widefield as wf

images, labels = torch.arange(20 * 64).remainder(251).to(torch.uint8).view(20, 1, 8, 8), torch.arange(20) % 3
data = TensorDataset(images[:14], labels[:14]), TensorDataset(images[14:], labels[14:])
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
config = {"data": {"batch_size": 5}, "schedule": {"length": "2ep"}, "log": {"tensorboard": False}}
outcome = wf.train(config, run=sys.argv[1], model=net, data=data, classes=3)
evaluation = wf.evaluate(sys.argv[1], model=net, data=data, classes=3)
assert outcome.status == 0 and evaluation.metrics == outcome.evaluation.metrics and evaluation.images == 6
wf.train(config, "schedule.length=3ep", run=sys.argv[1], model=net, data=data, classes=3)
print(f"weights {net[1].weight.sum().item():.9f}")
"""


@pytest.mark.long
@pytest.mark.alone
def test_a_script_under_torchrun_may_train_and_evaluate_and_train_on(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command += [str(tmp_path / "script.py"), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({line for line in done.stdout.splitlines() if line.startswith("weights ")}) == 1
    assert len(record(tmp_path / "run", "step")) == 9 and record(tmp_path / "run", "start")[0]["ranks"] == 2
