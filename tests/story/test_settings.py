"""A recipe, end to end, in this process: every setting trains, resumes bit for bit, and refuses in words."""

from __future__ import annotations

import csv
import json
import math
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import DIGITS, fingerprint, forget_after, losses, record
from marks import few
from photos import photo_folder
from torch import nn

import widefield as wf
from widefield import inference, models
from widefield.comm.mesh import AgreedError, World
from widefield.config import read_config
from widefield.run import train
from widefield.training.loop import NonFiniteLossError

SHORT = ["schedule.length=6step", "schedule.warmup=2step", "evaluate.every=1000step", "log.tensorboard=false"]


def go(folder: Path, *settings: str, recipe: str = DIGITS):
    return train(read_config(recipe, [*SHORT, *settings]), folder, World())


# ------------------------------------------------------------------------------------------------ settings

SETTINGS = {
    "float64": ["precision=float64"],
    "bfloat16": ["precision=bfloat16"],
    "float16": ["precision=float16", "schedule.length=3step", "data.batch_size=8"],
    "channels_last": ["model.channels_last=true"],
    "compile": ["model.compile=true", "schedule.length=3step", "schedule.warmup=0step"],
    "ema": ["ema.decay=0.9"],
    "clip": ["optimizer.clip_norm=0.5"],
    "adamw": ["optimizer.name=adamw", "optimizer.lr=null", "optimizer.nesterov=false"],
    "lars": ["optimizer.name=lars", "optimizer.lr=null"],
    "lamb": ["optimizer.name=lamb", "optimizer.lr=null"],
    "accumulate": ["gradient.accumulate=3"],
    "mixing": ["data.mixup=0.2", "data.cutmix=1.0"],
    "workers": ["data.workers=2"],
    "step": ["schedule.name=step", "schedule.every=2step"],
    "onecycle": ["schedule.name=onecycle"],
    "polynomial": ["schedule.name=polynomial", "schedule.power=2"],
    "deterministic": ["deterministic=true"],
    "timm": ["model.name=timm/test_resnet", "model.options={}"],
    "unsynchronized": ["batch_norm=averaged"],
}


FIRST = ("ema", "lamb")


@pytest.mark.long
@pytest.mark.parametrize("name", few(SETTINGS, *FIRST, then=["float16", "accumulate", "clip"], is_sweep=True))
def test_a_resumed_run_equals_one_that_was_not_stopped(name, tmp_path):
    settings = SETTINGS[name]
    if name == "compile":
        pytest.importorskip("torch._inductor")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    last = next((word for word in reversed(settings) if word.startswith("schedule.length")), SHORT[0])
    try:
        assert go(whole, *settings).reason == "complete"
        _stop_after(cut, 2, settings)
        assert go(cut, *settings).reason == "complete"
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(losses(cut)) == int(last.removeprefix("schedule.length=").removesuffix("step"))
    assert all(math.isfinite(loss) for loss in losses(whole))
    assert fingerprint(whole, ranks=1) == fingerprint(cut, ranks=1)


def _stop_after(folder: Path, step: int, settings: list[str]) -> None:
    """Train, but be killed after `step`: keep what a run has on disk that saved there."""
    go(folder, *settings, "checkpoint.every=1step", "checkpoint.keep_last=100")
    forget_after(folder, step)


def test_every_chosen_value_is_told_with_its_reason(tmp_path, capsys):
    go(tmp_path / "run", "optimizer.lr=null")
    printed = capsys.readouterr().out
    reasons = record(tmp_path / "run", "start")[0]["reasons"]
    for value in ("precision=float32", "data.workers=0", "optimizer.lr=0.025", "model.channels_last=false"):
        assert any(reason.startswith(value) and ":" in reason for reason in reasons), value
        assert value in printed
    assert "by the linear rule, for batch 64" in printed


def test_a_run_folder_can_be_read_without_us(tmp_path):
    folder = tmp_path / "run"
    train(read_config(DIGITS, ["schedule.length=2ep"]), folder, World())
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "plan.yaml", "record.jsonl", "summary.csv", "tensorboard", "checkpoints", "report.html"} <= names
    steps = record(folder, "step")
    assert [line["step"] for line in steps] == list(range(1, 47))
    assert [row["step"] for row in csv.DictReader((folder / "summary.csv").read_text().splitlines())] == ["23", "46"]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert sum(map(sum, evaluation["confusion"])) == 360
    wrong = 360 - sum(evaluation["confusion"][i][i] for i in range(10))
    assert len(evaluation["mistakes"]) == min(24, wrong)
    config = read_config(DIGITS)
    plain = models.build(config.model, in_channels=1, num_classes=10)
    plain.load_state_dict(safetensors.torch.load_file(folder / "weights.safetensors"))
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=folder / "checkpoints" / "step_00000046", check=True
    )


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_goes_on(tmp_path):
    folder = tmp_path / "run"
    go(folder)
    before = fingerprint(folder, ranks=1)
    assert go(folder).step == 6
    assert fingerprint(folder, ranks=1) == before
    assert go(folder, "schedule.length=9step").step == 9
    assert [line["step"] for line in record(folder, "step")] == list(range(1, 10))
    assert any("schedule.length: 6step -> 9step" in line["text"] for line in record(folder, "warning"))


def test_every_checkpoint_written_in_the_background_gets_its_line(tmp_path):
    go(tmp_path / "run", "checkpoint.every=1step")
    assert [line["step"] for line in record(tmp_path / "run", "checkpoint")] == [1, 2, 3, 4, 5, 6]


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.one = nn.Linear(64, num_classes)
        self.two = nn.Linear(64, num_classes)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.one(x.flatten(1)) + self.two(x.flatten(1))


def test_an_export_of_tied_weights_has_every_name_and_loads_again(tmp_path):
    folder, name = tmp_path / "run", f"model.name={__name__}:Tied"
    sys.modules[__name__] = sys.modules.get(__name__) or sys.modules["test_settings"]
    go(folder, name, "model.options={}")
    path = inference.export(folder, "safetensors", output=tmp_path / "tied.safetensors", trust=True)
    assert set(safetensors.torch.load_file(path)) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    inference.export(folder, "state_dict", output=tmp_path / "tied.pt", weights=str(path), trust=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path):
    folder = tmp_path / "run"
    go(folder, "checkpoint.every=2step")
    bad = next((folder / "checkpoints" / "step_00000006").glob("*.safetensors"))
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 4
    bad.write_bytes(content)
    go(folder)
    assert record(folder, "start")[-1]["resumed_from"] == 4
    assert any(bad.name in line["text"] for line in record(folder, "warning"))


@pytest.mark.parametrize("harm", few(["removed", "damaged"], "removed"))
def test_a_run_without_a_checkpoint_does_not_begin_anew_over_its_weights(harm, tmp_path):
    folder = tmp_path / "run"
    go(folder)
    for place in (folder / "checkpoints").iterdir():
        shutil.rmtree(place) if harm == "removed" else (place / "plain.json").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(AgreedError, match="holds the weights.safetensors of a run and no checkpoint to go on from") as refused:
        go(folder)
    assert ("plain.json, which manifest.sha256 lists, is missing" in str(refused.value)) == (harm == "damaged")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    (folder / "weights.safetensors").unlink()
    assert go(folder).step == 6 and len(losses(folder)) == 6


# ------------------------------------------------------------------------------------------------ afterwards


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(read_config(DIGITS, ["schedule.length=4ep"]), folder, World())
    return folder


@pytest.mark.long
def test_exports_answer_as_the_model_does(trained, tmp_path):
    image = torch.randn(3, 1, 8, 8)
    tensors = safetensors.torch.load_file(inference.export(trained, "safetensors", output=tmp_path / "a.safetensors"))
    plain = models.build(read_config(DIGITS).model, in_channels=1, num_classes=10).eval()
    plain.load_state_dict(tensors)
    wanted = plain(image)
    loaded = torch.load(inference.export(trained, "state_dict", output=tmp_path / "b.pt"), weights_only=True)
    plain.load_state_dict(loaded)
    assert torch.equal(plain(image), wanted)
    onnxruntime = pytest.importorskip("onnxruntime")
    path = inference.export(trained, "onnx", output=tmp_path / "c.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"image": image.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-4)  # float32, other kernels
    assert json.loads((tmp_path / "c.json").read_text())["classes"] == [str(digit) for digit in range(10)]
    with pytest.raises(ValueError, match="cannot export to 'onx'; did you mean 'onnx'"):
        inference.export(trained, "onx")


def test_an_export_overwrites_nothing_that_was_not_named(trained, tmp_path):
    (tmp_path / "package.json").write_text('{"name": "of a web page"}')
    for output, says in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "model.json", "is where the classes and the normalization go"),
        (tmp_path / "package.pt", "and there is another file of that name"),
    ):
        with pytest.raises(ValueError, match=says):
            inference.export(trained, "state_dict", output=output)
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*model.pt \(.*file is no folder\); name another --output"):
        inference.export(trained, "state_dict", output=tmp_path / "file" / "model.pt")
    for _ in range(2):
        assert inference.export(trained, "state_dict", output=tmp_path / "model.pt").is_file()


def test_predictions_of_pictures_are_those_of_the_evaluation(trained, tmp_path):
    from widefield.config import DataConfig
    from widefield.data import open_dataset
    from widefield.data.image import write_image

    digits = open_dataset(DataConfig(name="digits")).evaluate
    paths = []
    for index in range(40):
        paths.append(str(tmp_path / f"{index}.png"))
        write_image(digits.read(index)[0], Path(paths[-1]))
    answers = wf.predict(trained, paths, top=10)
    assert all(abs(sum(answer.probabilities) - 1) < 1e-6 for answer in answers)
    right = sum(answer.classes[0] == str(digits.read(index)[1]) for index, answer in enumerate(answers))
    assert right >= 36  # the run reaches about 97 % on all 360
    with pytest.raises(ValueError, match="--top is 0; write how many classes to name, 1 or more"):
        wf.predict(trained, paths[:1], top=0)
    with pytest.raises(ValueError, match="cannot read the image .*nowhere.png"):
        wf.predict(trained, [str(tmp_path / "nowhere.png")])


# ------------------------------------------------------------------------------------------------ bad input


class Poisoned(nn.Module):
    """Gives NaN for one bright image of the photographs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
        self.net(torch.zeros(1, 3, 16, 16))

    def forward(self, x):
        return self.net(x) + torch.where(x.mean((1, 2, 3)) > 5, math.nan, 0.0).unsqueeze(1)


def photos(tmp_path: Path, model: str = "resnet") -> str:
    recipe = tmp_path / "recipe.yaml"
    data = photo_folder(tmp_path / "photos", size=16)
    recipe.write_text(f"model: {{name: '{model}'}}\ndata: {{name: imagefolder, path: {data}, batch_size: 6, workers: 0}}\n")
    return str(recipe)


def test_a_loss_that_is_no_number_changes_no_weight_and_names_the_images(tmp_path):
    recipe, folder = photos(tmp_path, f"{__name__}:Poisoned"), tmp_path / "run"
    sys.modules[__name__] = sys.modules.get(__name__) or sys.modules["test_settings"]
    go(folder, "schedule.length=2step", "schedule.warmup=0step", recipe=recipe)
    before = fingerprint(folder, ranks=1)
    from PIL import Image

    Image.new("RGB", (16, 16), "white").save(tmp_path / "photos" / "train" / "china" / "3.png")
    settings = ["schedule.length=40step", "data.mean=[0.0,0.0,0.0]", "data.std=[0.1,0.1,0.1]", "optimizer.lr=1e-9"]
    with pytest.raises(NonFiniteLossError, match="the loss of step .* is nan; the optimizer did not step"):
        go(folder, *settings, "checkpoint.every=1000step", recipe=recipe)
    told = json.loads((folder / "nan.json").read_text())
    assert any(name.endswith("china/3.png") for name in told["images"]) and len(told["images"]) == 6
    after = fingerprint(folder, ranks=1)
    assert all(after[key] == before[key] for key in ("model", "optimizer", "order"))
    assert record(folder, "end")[-1]["reason"] == "failed"


def test_unreadable_images_are_left_out_counted_and_named_if_asked(tmp_path):
    recipe, folder = photos(tmp_path), tmp_path / "run"
    for place in ("train/flower/2.png", "val/china/13.png"):
        (tmp_path / "photos" / place).write_bytes(b"\x89PNG no image")
    with pytest.raises(AgreedError, match="cannot read the image .*data.bad_images=skip"):
        go(tmp_path / "stopped", "schedule.length=2ep", recipe=recipe)
    outcome = go(folder, "data.bad_images=skip", "schedule.length=2ep", recipe=recipe)
    assert outcome.evaluation.sentence.endswith("on 11/12 images, 1 unreadable left out")
    assert any("flower/2.png" in line["text"] for line in record(folder, "warning"))
    report = (folder / "report.html").read_text()
    assert "flower/2.png" in report and "val/china/13.png" in report


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.name=resnt"], "did you mean 'resnet'"),
        (["model.options={width: [8]}"], "does not take model.options"),
        (["data.name=digit"], "did you mean 'digits'"),
        (["data.name=imagefolder", "data.path=nowhere"], "there is no such folder"),
        (["task.name=classificaton"], "did you mean 'classification'"),
        (["optimizer.name=adam"], "did you mean 'adamw'"),
        (["optimizer.options={foo: 1}"], "do not fit 'sgd'"),
        (["schedule.name=cosin"], "did you mean 'cosine'"),
        (["schedule.warmup=9step"], "longer than schedule.length"),
        (["precision=tf32"], "tf32 is a mode of NVIDIA GPUs"),
        (["data.read=[RandomCorp: {size: 8}]"], "did you mean 'RandomCrop'"),
        (["data.mean=[0.1, 0.2]"], "data.mean has 2 numbers"),
        (["data.std=[0]"], "'data.std.0' is 0 "),
        (["optimizer.lr=.inf"], "'optimizer.lr' is inf .*input should be a finite number"),
        (["optimizer.options={dampening: -1}"], "optimizer.options {'dampening': -1} do not fit 'sgd'"),
        (["optimizer.name=adamw", "optimizer.options={eps: -1}"], "optimizer.options {'eps': -1} do not fit 'adamw'"),
        (["model.options={widths: [8, -8]}"], r"model.options.widths is \[8, -8\]; whole numbers above 0 are wanted"),
        (["model.options={widths: []}"], r"model.options.widths is \[\]; whole"),
        (["model.options={blocks: 0}"], "model.options.blocks is 0; whole"),
        (["model.options={dropout: 1.5}"], "model.options.dropout is 1.5; a number from 0"),
        (["model.name=unet", "model.options={widths: [0]}"], r"model.options.widths is \[0\]; whole"),
        (
            ["model.name=timm/resnet18", "model.options={cardinality: 0}"],
            "timm/resnet18 cannot be built with model.options {'cardinality': 0}: AssertionError: BasicBlock only supports",
        ),
        (["schedule.length=0ep"], "schedule.length is 0ep, so there is nothing to train"),
        (["model.weights=nowhere.safetensors"], "there are no weights"),
        (["checkpoint.every=0ep"], "0ep never comes"),
        (
            ["mesh.data_strategy=data_parallel", "batch_norm=broadcast"],
            "spreads a batch over the GPUs",
        ),
        (["mesh.replicate=2"], "needs 2 ranks and there are 1"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused_in_words(settings, words, tmp_path):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        go(tmp_path / "run", *settings)


def test_a_format_whose_pixels_spread_by_nothing_is_refused(tmp_path, monkeypatch):
    from widefield.data.formats import digits

    opened = digits.open_dataset
    monkeypatch.setattr(digits, "open_dataset", lambda config: replace(opened(config), std=[0.0]))
    with pytest.raises(AgreedError, match=r"the standard deviations \[0.0\], and they are divided by these; set data.std"):
        go(tmp_path / "run")
    assert go(tmp_path / "run", "data.std=[1]").reason == "complete"


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "run"
    go(folder)
    before = fingerprint(folder, ranks=1)
    with pytest.raises(ValueError, match="head.weight"):
        go(folder, "model.options={widths: [8, 16], blocks: 1}", "schedule.length=9step")
    assert fingerprint(folder, ranks=1) == before


@pytest.mark.parametrize(
    ("setting", "words"),
    [("seed=1", "seed 0 and this run has 1"), ("data.batch_size=50", "384 images into an epoch, which data.batch_size=50")],
)
def test_a_resumed_run_that_would_lose_samples_is_refused(setting, words, tmp_path):
    go(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        go(tmp_path / "run", setting, "schedule.length=9step")


def test_more_ranks_than_a_batch_or_the_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 copies of the model share a batch of 2"):
        train(read_config(DIGITS, ["data.batch_size=2"]), tmp_path, World(rank=0, size=3))


@pytest.mark.long
def test_a_full_disk_during_a_save_loses_nothing(tmp_path):
    """The operating system refuses bytes in the middle of the second checkpoint; the run says so and ends with status 1."""
    folder = tmp_path / "run"
    go(folder)
    size = max(path.stat().st_size for path in (folder / "checkpoints" / "step_00000006").iterdir())
    code = (
        "import resource, sys; from widefield.cli import main;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {resource.RLIM_INFINITY}));"
        f"sys.exit(main({['train', DIGITS, '--run', str(folder), *SHORT, 'schedule.length=9step']!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000006"]
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "step_00000009" in ended.stdout or "step 9" in ended.stdout
    assert go(folder, "schedule.length=9step").step == 9
