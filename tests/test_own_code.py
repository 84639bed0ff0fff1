"""Parts of the user's own by name, `module:callable`: found beside the recipe, called as a file of the folder is, refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command import assert_same, fingerprint, forget_after, record
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield import cli, own_code
from widefield.comm.mesh import AgreedError
from widefield.config import OptimizerConfig, ScheduleConfig, read_config
from widefield.data.order import Steps
from widefield.own_code import code_named
from widefield.plans import Plan
from widefield.quantity import Duration
from widefield.training.optimizer import build_optimizer, learning_rate
from widefield.training.schedule import build_schedule

MINE = '''
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import Metric

from widefield.data import Dataset
from widefield.tasks.classification import Classification


@dataclass(frozen=True)
class Stripes:
    count: int

    def __len__(self):
        return self.count

    def read(self, index):
        image = torch.zeros(1, 6, 6, dtype=torch.uint8)
        image[:, :: 2 + index % 2] = 40 + index
        return image, index % 2

    def name_of(self, index):
        return f"stripes/{index}"


def stripes(config, *, count=21):
    assert config.batch_size == 4
    return Dataset(Stripes(count), Stripes(7), ["narrow", "wide"], 1, [0.2], [0.3], in_memory=True)


def pair(config):
    images = torch.arange(10 * 36).remainder(256).to(torch.uint8).view(10, 1, 6, 6)
    samples = [(image, number % 2) for number, image in enumerate(images)]
    train = type("Train", (list,), {"classes": ["even", "odd"]})(samples[:6])
    return train, samples[6:]


def empty(config):
    return Dataset(Stripes(0), Stripes(7), ["narrow", "wide"], 1, [0.2], [0.3], in_memory=True)


def lopsided(config):
    return Dataset(Stripes(4), Stripes(7), ["narrow", "wide"], 1, [0.2, 0.2], [0.3], in_memory=True)


def net(num_classes, width=4):
    layers = [nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


@dataclass(frozen=True)
class Focal(Classification):
    gamma: float = 2.0

    def loss_each(self, output, target):
        loss = F.cross_entropy(output, target, reduction="none")
        return loss * (1 - (-loss).exp()) ** self.gamma

    def loss_sum(self, output, target):
        return self.loss_each(output, target).sum()


def focal(num_classes, *, gamma=2.0):
    return Focal(num_classes, gamma=gamma)


class Bounded(torch.optim.Optimizer):
    """Momentum of gradients that are squeezed below 1, each number by itself."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    kept.mul_(group["momentum"]).add_(p.grad / (1 + p.grad.abs()))
                    p.add_(kept + group["weight_decay"] * p, alpha=-group["lr"])


class OfNorms(Bounded):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


def row(groups, config, lr, fused):
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=fused)


def half(groups, lr):
    return torch.optim.SGD(groups[:1], lr=lr)


def halving(schedule, share, samples):
    return 0.5 ** int(4 * share)


def falling(schedule, share, samples):
    return 1 - 3 * share


class Confident(Metric):
    """Share of images whose likeliest class has at least `least`, and the largest and all of the probabilities."""

    full_state_update = False

    def __init__(self, num_classes, least=0.5):
        super().__init__()
        self.least = least
        self.add_state("sure", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("top", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, answers, target):
        best = answers.double().amax(1)
        self.sure += torch.stack([(best >= self.least).sum(), torch.tensor(len(best))])
        self.top = torch.maximum(self.top, best.max())
        self.seen.append(best)

    def compute(self):
        seen = torch.cat([part.view(-1) for part in self.seen])
        return {"share": self.sure[0] / self.sure[1], "top": self.top, "spread": seen.std(), "first": seen[0]}


class OfBatches(Metric):
    how = "sum"

    def __init__(self, num_classes):
        super().__init__()
        self.add_state("total", torch.zeros(2), dist_reduce_fx=self.how)

    def update(self, answers, target):
        self.total += torch.stack([answers.amax(1).max(), torch.tensor(1.0)])

    def compute(self):
        return self.total[0] / self.total[1]


class OfMeans(OfBatches):
    how = "mean"


text = "no callable"
'''
RECIPE = """
model: {name: "mine:net", options: {width: 5}}
data: {name: "mine:stripes", options: {count: 19}, batch_size: 4, workers: 0}
task: {name: "mine:focal", options: {gamma: 1.5}, metrics: [{"mine:Confident": {least: 0.6}}, MulticlassF1Score]}
optimizer: {name: "mine:Bounded", options: {momentum: 0.8}, lr: 0.01}
schedule: {name: "mine:halving", length: 7step}
evaluate: {every: 1000step}
precision: float64
log: {tensorboard: false}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """The recipe above with the file that it names beside it, in a folder that nobody stands in."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "mine.py").write_text(MINE)
    (place / "mine.yaml").write_text(RECIPE)
    yield place / "mine.yaml"
    forget("mine")


@pytest.fixture(autouse=True)
def as_before():
    """sys.path, and where users' modules are looked for, as a fresh process has them."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    own_code._beside.clear()
    own_code._added.clear()


def forget(*modules: str) -> None:
    for module in modules:
        sys.modules.pop(module, None)


# ---------------------------------------------------------------------------------------------- a recipe of nothing else


def named_run(mesh, recipe: Path, folder: Path, *settings: str):
    forget("mine")
    evaluation = wf.train(recipe, *settings, run=folder).evaluation
    again = wf.evaluate(folder, *settings, trust=True)
    assert again.metrics == evaluation.metrics and again.confusion == evaluation.confusion
    return evaluation.metrics, evaluation.sentence


@pytest.mark.long
def test_every_part_may_be_a_callable_of_a_file_beside_the_recipe(recipe, tmp_path):
    metrics, sentence = named_run(None, recipe, tmp_path / "one")
    assert set(metrics) == {
        "top1", "Confident_share", "Confident_top", "Confident_spread", "Confident_first", "MulticlassF1Score"
    }  # fmt: skip
    assert f", Confident_top {metrics['Confident_top']:.4g}, " in sentence and sentence.endswith("on 7/7 images")
    for found, _ in on_ranks(2, named_run, recipe, tmp_path / "two"):
        assert found == pytest.approx(metrics, rel=1e-9)  # float64; the order of images is one rank's
    assert_same(tmp_path / "two", tmp_path / "one")
    rates = [line["lr"] for line in record(tmp_path / "one", "step")]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125]) and read_config(recipe).seed == 0


@pytest.mark.long
def test_such_a_run_goes_on_in_mid_epoch_bit_for_bit(recipe, tmp_path):
    wf.train(recipe, run=tmp_path / "whole")
    wf.train(recipe, "checkpoint.every=1step", "checkpoint.keep_last=99", run=tmp_path / "cut")
    forget_after(tmp_path / "cut", 3)
    assert wf.train(recipe, run=tmp_path / "cut").step == 7
    assert record(tmp_path / "cut", "start")[-1]["resumed_from"] == 3
    assert fingerprint(tmp_path / "cut", ranks=1) == fingerprint(tmp_path / "whole", ranks=1)


@pytest.mark.long
@pytest.mark.parametrize("settings", [["mesh.shard=2"], ["mesh.shard=2", "sharding.zero=1"], ["mesh.stage=2"]])
def test_an_own_optimizer_steps_parts_as_the_whole(settings, recipe, tmp_path):
    wf.train(recipe, run=tmp_path / "one")
    plan = wf.plan(recipe, *settings, ranks=2)
    on_ranks(2, trained, recipe, tmp_path / "two", *settings, plan=plan)
    assert_same(tmp_path / "two", tmp_path / "one")


def trained(mesh, recipe: Path, folder: Path, *settings: str) -> None:
    forget("mine")
    wf.train(recipe, *settings, run=folder)


@pytest.mark.long
def test_the_command_finds_the_file_from_anywhere_on_ranks_too(recipe, tmp_path):
    """As it is installed: Python looks neither in the folder that one stands in nor beside the recipe."""
    here = tmp_path / "here"
    here.mkdir()
    program = "import sys; sys.path[:] = [p for p in sys.path if p]; from widefield.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = ["train", str(recipe), "mesh.replicate=2", "--run", "run"]
    command = [sys.executable, "-P", "-c", program, *words]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 7/7 images" in done.stdout and record(here / "run", "start")[0]["ranks"] == 2


# ---------------------------------------------------------------------------------------------- where it is looked for


def test_a_module_is_looked_for_where_one_stands_then_beside_the_recipe(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for place, text in ((here, "here"), (there, "there")):
        place.mkdir()
        for name in (["both_places"], ["both_places", "only_there"])[text == "there"]:
            (place / f"{name}.py").write_text(f"def part():\n    return {text!r}\n")
    (there / "torch.py").write_text("raise SystemExit('an installed package is hidden')")
    monkeypatch.chdir(here)
    own_code.look_in(there)
    assert code_named("both_places:part", key="data.name")() == "here"
    assert code_named("only_there:part", key="data.name")() == "there"
    assert code_named("torch.nn:Identity", key="data.name") is nn.Identity
    own_code.look_in(tmp_path)
    forget("both_places", "only_there")
    with pytest.raises(
        ValueError, match=r"data.name is 'only_there:part' .*No module named 'only_there'; looked for where Python"
    ):
        code_named("only_there:part", key="data.name")
    assert str(there) not in sys.path
    forget("both_places")


def test_two_files_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text("part = dict\n")
    own_code.look_in(tmp_path / "a")
    assert code_named("same_name:part", key="task.name") is dict
    own_code.look_in(tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"a module 'same_name' was imported from .*a/same_name.py and the one asked for is .*b/"
    ):
        code_named("same_name:part", key="task.name")
    forget("same_name")


def test_a_run_folder_is_never_looked_in(recipe, tmp_path, monkeypatch, capsys):
    """Whoever names code means their own, and a stranger's folder may hold a file of that name."""
    folder = wf.train(recipe, "schedule.length=1step", run=tmp_path / "run").run
    forget("mine")
    own_code._beside.clear()
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(recipe.parent))])
    names = [f"{key}.name=mine:{name}" for key, name in (("model", "net"), ("data", "stripes"), ("task", "focal"))]
    for arguments in (["--trust"], [*names, "task.metrics=[]"]):
        assert cli.main(["evaluate", str(folder), *arguments]) == 2
        assert "No module named 'mine'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine:nett", r"model.name is 'mine:nett' and .*module 'mine' has no attribute 'nett'; did you mean 'net'\?"),
        ("mine:text", "model.name is 'mine:text' and that is a str, which cannot be called"),
        (
            "min:net",
            "model.name is 'min:net' and that cannot be imported: No module named 'min'; looked for where Python looks",
        ),
    ],
)
def test_a_callable_that_is_not_there_is_refused(name, told, recipe, tmp_path):
    with pytest.raises(AgreedError, match=told):
        wf.train(recipe, f"model.name={name}", run=tmp_path / "run")


def test_a_mistake_in_the_users_file_keeps_its_traceback(recipe, tmp_path):
    (recipe.parent / "mine.py").write_text("import math\nmath.nothing\n")
    with pytest.raises(AttributeError, match="module 'math' has no attribute 'nothing'"):
        wf.train(recipe, run=tmp_path / "run")


# ---------------------------------------------------------------------------------------------- what each must give


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["data.name=mine:pair"], r"data.options \{'count': 19\} do not fit 'mine:pair': got an unexpected keyword argument"),
        (["data.name=builtins:repr", "data.options={}"], "data.name=builtins:repr gives a str; a widefield.data.Dataset"),
        (["data.name=mine:empty", "data.options={}"], "gives 0 images to train on, 7 to evaluate and 2 classes; at least 1 of"),
        (["data.name=mine:lopsided", "data.options={}"], "gives 1 channels and 2 numbers as mean; one per channel is wanted"),
        (["task.name=mine:net", "task.options={}"], "task.name=mine:net gives a Sequential, which lacks loss_sum; an object"),
        (["task.options={gama: 1}"], r"task.options \{'gama': 1\} do not fit 'mine:focal': got an unexpected keyword argument"),
        (["optimizer.name=mine:net"], "optimizer.options {'momentum': 0.8} do not fit 'mine:net'"),
        (["optimizer.name=builtins:dict"], "optimizer.name=builtins:dict gives a dict; a torch.optim.Optimizer is wanted"),
        (["optimizer.name=mine:half", "optimizer.options={}"], "steps 2 of the 6 parameters that it was given, and 2 in all"),
        (["optimizer.lr="], "optimizer.lr is not set, and optimizer.name=mine:Bounded is no optimizer whose learning"),
        (["schedule.name=mine:falling"], "schedule.name=mine:falling gives -0.4.* after 13 samples, as a factor of the peak"),
        (["schedule.name=mine:text"], "schedule.name is 'mine:text' and that is a str, which cannot be called"),
        (["task.metrics=[mine:net]"], "task.metrics: mine:net gives a Sequential; a torchmetrics.Metric is wanted"),
        (["task.metrics=['mine:OfBatches']"], "OfBatches gives .* for a made-up example at once and .* in two batches, so"),
        (["task.metrics=['mine:OfMeans']"], "the state 'total' of OfMeans does not add up over ranks"),
        (["task.metrics=[MulticlassF1Scor]"], "have no 'MulticlassF1Scor'; did you mean 'MulticlassF1Score'"),
        (["task.metrics=[{MulticlassF1Score: {averag: macro}}]"], "MulticlassF1Score cannot be made: .*averag"),
        (["task.metrics=[MulticlassConfusionMatrix]"], r"gives a tensor of shape \(2, 2\), and an evaluation"),
        (["task.metrics=[MulticlassF1Score, MulticlassF1Score]"], "there are two metrics of the name 'MulticlassF1Score'"),
        (["task.metrics=[3]"], "task.metrics holds 3; write a name, or one name with its arguments"),
        (["task.metrics=[{MulticlassAccuracy: 3}]"], "task.metrics holds {'MulticlassAccuracy': 3}; write a name"),
        (["task.metrics=[BinaryF1Score]"], "BinaryF1Score cannot be updated with answers of"),
    ],
)  # fmt: skip
def test_what_a_callable_gives_is_looked_at_before_the_run(settings, told, recipe, tmp_path):
    with pytest.raises((ValueError, NotImplementedError), match=told):
        wf.train(recipe, *settings, run=tmp_path / "run")
    assert record(tmp_path / "run", "step") == []


def test_a_callable_may_give_two_map_style_datasets(recipe, tmp_path):
    outcome = wf.train(recipe, "data.name=mine:pair", "data.options={}", run=tmp_path / "run")
    assert (outcome.evaluation.of, yaml.safe_load((tmp_path / "run" / "model.json").read_text())["classes"]) == (
        4,
        ["even", "odd"],
    )


def refused_in_parts(mesh, recipe: Path, folder: Path) -> str:
    forget("mine")
    settings = ["optimizer.name=mine:OfNorms", "mesh.shard=2"]
    with pytest.raises(AgreedError) as caught:
        wf.train(recipe, *settings, run=folder)
    return str(caught.value)


def test_an_optimizer_that_looks_at_whole_weights_is_refused_where_ranks_hold_parts(recipe, tmp_path):
    wf.train(recipe, "optimizer.name=mine:OfNorms", run=tmp_path / "whole")
    for told in on_ranks(2, refused_in_parts, recipe, tmp_path / "run", plan=Plan(shard=2)):
        assert "optimizer.name=mine:OfNorms steps a part of a weight in another way than the whole" in told
        assert "under shard=2, ZeRO-3 ranks hold parts; take one that steps each number by itself" in told


def test_a_class_of_torch_serves_and_so_does_a_row_of_the_table(recipe):
    own_code.look_in(recipe.parent)
    model = nn.Linear(3, 2)
    options = {"momentum": 0.5}
    theirs = build_optimizer(OptimizerConfig(name="torch.optim:RMSprop", options=options, weight_decay=0.1), model, 0.3)
    assert isinstance(theirs, torch.optim.RMSprop) and [group["weight_decay"] for group in theirs.param_groups] == [0.1, 0.0]
    assert all((group["lr"], group["momentum"]) == (0.3, 0.5) for group in theirs.param_groups)
    row = build_optimizer(OptimizerConfig(name="mine:row", momentum=0.7), model, 0.3)
    assert all((group["momentum"], group["fused"]) == (0.7, True) for group in row.param_groups)
    by_rule = OptimizerConfig(name="torch.optim:RMSprop", base_lr=0.2, lr_rule="sqrt")
    assert learning_rate(by_rule, 1024)[0] == 0.4


def test_a_curve_is_given_the_schedule_the_share_and_the_samples(recipe):
    own_code.look_in(recipe.parent)
    steps = Steps(samples=100, batch=10)
    config = ScheduleConfig(name="mine:halving", length=Duration(20, "step"), warmup=Duration(4, "step"), warmup_from=0.5)
    curve = build_schedule(config, seen=steps.seen, steps_per_epoch=steps.per_epoch)
    assert [curve.factor(samples) for samples in (0, 20, 40, 79, 80, 160, 200)] == [0.5, 0.75, 1, 1, 0.5, 0.125, 0.0625]


@pytest.mark.long
@pytest.mark.sweep
def test_a_comparison_of_plans_finds_the_file_beside_the_recipe(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    words = ["--plans", "one rank", "--steps", "1", "--warmup", "1", "--out", str(tmp_path / "bench")]
    assert cli.main(["bench", str(recipe), *words]) == 0


# ---------------------------------------------------------------------------------------------- trust


def test_no_part_that_a_run_folder_names_is_run_unless_named_or_trusted(recipe, tmp_path, capsys):
    folder = wf.train(recipe, "schedule.length=1step", run=tmp_path / "run").run
    forget("mine")
    trace = tmp_path / "trace"
    (recipe.parent / "mine.py").write_text(f"{MINE}\nimport pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    names = {"model": "net", "data": "stripes", "task": "focal"}
    given: list[str] = []
    for key, name in [*names.items(), ("task.metrics", "Confident")]:
        wanted = f"{key}.name" if key in names else key
        told = f"{wanted} is '.*mine:{name}.*', code of its own, .*; nothing of it was run.*; from Python, trust=True"
        with pytest.raises(ValueError, match=told):
            wf.evaluate(folder, *given)
        given.append(f"{wanted}=mine:{name}" if key in names else f"{wanted}=[MulticlassF1Score]")
    with pytest.raises(ValueError, match="optimizer.name is 'mine:Bounded', code of its own"):
        wf.train(folder / "config.yaml", *given, run=tmp_path / "other")
    with pytest.raises(ValueError, match="schedule.name is 'mine:halving', code of its own"):
        wf.train(folder / "config.yaml", *given, "optimizer.name=sgd", run=tmp_path / "other")
    with pytest.raises(ValueError, match="model.name is 'mine:net', code of its own"):
        wf.predict(folder, torch.zeros(1, 6, 6, dtype=torch.uint8))
    assert not trace.exists()
    assert wf.evaluate(folder, *given).of == 7 and trace.exists()  # what only training builds is of no interest here
    assert wf.predict(folder, torch.zeros(1, 6, 6, dtype=torch.uint8), trust=True)[0].classes
    assert cli.main(["report", str(folder)]) == 0


@pytest.mark.long
def test_the_users_recipe_goes_on_with_the_run_and_its_copy_too(recipe, tmp_path):
    folder = wf.train(recipe, "schedule.length=1step", run=tmp_path / "run").run
    shutil.copy(folder / "config.yaml", recipe.parent / "copy.yaml")
    assert wf.train(recipe.parent / "copy.yaml", "schedule.length=2step", run=folder).step == 2
    assert wf.train(folder / "config.yaml", "schedule.length=3step", run=folder, trust=True).step == 3
