"""Do the words say what the code does?  Every command, recipe and example in README, CONTRIBUTING and docs/ is tried here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ranks import on_ranks
from torch import nn
from torch.distributed.run import get_args_parser

import widefield as wf
from widefield import cli, data, launchers, models, tasks
from widefield.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TaskConfig, parse_config, read_config
from widefield.data.image import write_image
from widefield.data.transforms import Transforms
from widefield.diagnosis.evidence import evidence_of_text
from widefield.diagnosis.findings import diagnosis_of
from widefield.naming import load, names_in
from widefield.plans import Plan
from widefield.section import Section
from widefield.streaming.api import Streamed
from widefield.training import optimizer, record, schedule
from widefield.training.checkpoint import newest_sound_in, read
from widefield.verification.forward import compare

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MODELS = ("timm/resnet50", "unet")
"""Planned by their names, for images of a size."""
STARTERS = ("widefield", "python", "srun", "mpirun", "torchrun")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and text, and where it stands."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            place = (str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1)
            found.append(Block(*place, match[2], match[3]))
    return [block for block in found if block.language == language]


def commands() -> list[Any]:
    """Every shell line that runs widefield, as (words of the launcher, words after `widefield`)."""
    found = []
    for block in blocks("bash"):
        text = re.sub(r"\\\n *", " ", block.text)  # a line that goes on behind a backslash
        for number, line in enumerate(text.splitlines(), start=block.line + 1):
            words = shlex.split(line, comments=True)
            if words and words[0] in STARTERS and "widefield" in words:
                at = words.index("widefield")
                found.append(pytest.param(words[:at], words[at + 1 :], id=f"{block.page}:{number}"))
    return found


def example(path: str) -> str:
    """The code on any of the pages whose first line names the file it would be."""
    found = [block.text for block in blocks("python") if block.text.startswith(f"# {path}\n")]
    assert len(found) == 1, f"the pages have {len(found)} examples for {path}"
    return found[0]


# ---------------------------------------------------------------------------------------------- commands and recipes


@pytest.mark.parametrize(("launcher", "words"), commands())
def test_every_command_is_one_that_the_command_takes(launcher, words, monkeypatch):
    taken = []
    monkeypatch.setattr(load("widefield.cli", words[0]), "run", lambda options: (taken.append(options), 0)[1])
    assert cli.main(words) == 0
    (options,) = taken
    recipe = getattr(options, "recipe", None)
    if str(recipe).endswith("/"):  # a folder of images
        return
    if getattr(options, "image", None) is not None and recipe in MODELS:
        return
    of_a_page = next((block.text for block in blocks("yaml") if block.text.startswith(f"# {recipe}\n")), None)
    if of_a_page is not None:
        parse_config(of_a_page, options.overrides)
        return
    read_config(ROOT / (recipe or "recipes/digits.yaml"), getattr(options, "overrides", []))


@pytest.mark.parametrize(("launcher", "words"), [case for case in commands() if case.values[0][:1] == ["torchrun"]])
def test_every_torchrun_command_leaves_our_options_to_us(launcher, words):
    """torchrun's parser looks behind the program's name too, and takes --run for its own --run-path."""
    options = get_args_parser().parse_args([*launcher[1:], "widefield", *words])
    assert (options.module, options.training_script, options.training_script_args) == (True, "widefield", words)


def test_a_torchrun_command_without_the_dashes_fails(capsys):
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "widefield", "train", "recipes/digits.yaml", "--run", "runs/one"])
    assert "ambiguous option: --run" in capsys.readouterr().err


def test_many_commands_were_found():
    """So that a change to the pages' form cannot empty the tests above."""
    assert len(commands()) > 20 and len(blocks("yaml")) >= 3


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_every_recipe_is_one_that_the_config_takes(block):
    """A fragment is completed by a model and a dataset."""
    values = {"model": {}, "data": {}} | yaml.safe_load(block.text)
    values["model"].setdefault("name", "resnet")
    values["data"].setdefault("name", "digits")
    parse_config(yaml.safe_dump(values), name=str(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_of_a_table_stands_under_its_head(page):
    """A blank line ends a table, and what follows it is shown as text with bars."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    runs = [list(run) for is_row, run in itertools.groupby(lines, lambda line: line.lstrip().startswith("|")) if is_row]
    assert [run[0] for run in runs if len(run) < 2 or not re.fullmatch(r"\s*\|([ :]*-+[ :]*\|)+\s*", run[1])] == []


# ---------------------------------------------------------------------------------------------- the table of keys


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_keys_is_what_the_config_says(generate):
    text = generate.PAGE.read_text(encoding="utf-8")
    assert generate.page(text) == text, "docs/guide/recipes.md is out of date; run: python docs/generate.py"


def test_the_table_has_every_key_that_a_resolved_recipe_has(generate):
    config = parse_config(
        "model: {name: resnet}\ndata: {name: digits}\nema: {decay: 0.9}\nstream: {tiles: [2]}\nrecompute: {}",
        ["data.patches={}"],
    )
    assert sorted(re.findall(r"^\| `([\w.]+)` \|", generate.table(), re.MULTILINE)) == sorted(keys_of(config))


def keys_of(section: Section, prefix: str = "") -> list[str]:
    found = []
    for name, value in section:
        found += keys_of(value, f"{prefix}{name}.") if isinstance(value, Section) else [prefix + name]
    return found


def test_a_key_that_nobody_explains_is_refused(generate, monkeypatch):
    monkeypatch.setattr(generate.RunConfig.model_fields["seed"], "description", None)
    with pytest.raises(ValueError, match="seed is not explained; write a docstring"):
        generate.table()


def test_a_page_without_a_place_for_the_table_is_refused(generate):
    with pytest.raises(ValueError, match="has no place for the table"):
        generate.page("# Recipes\n")


# ---------------------------------------------------------------------------------------------- the examples of CONTRIBUTING


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Adds an example to its package, as if the file lay in the folder, for the length of a test."""

    def add(path: str) -> Any:
        package, name = ".".join(Path(path).parts[:-1]), Path(path).stem
        assert name not in names_in(package)
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{name}.py").write_text(example(path), encoding="utf-8")
        importlib.import_module(package).__path__.append(str(folder))
        names.append((package, name, str(folder)))
        return importlib.import_module(f"{package}.{name}")

    names: list[tuple[str, str, str]] = []
    yield add
    for package, name, folder in names:
        importlib.import_module(package).__path__.remove(folder)
        del sys.modules[f"{package}.{name}"]
        delattr(sys.modules[package], name)


def test_the_example_of_a_task_works(added):
    module = added("widefield/tasks/hinge.py")
    task = tasks.build(TaskConfig(name="hinge", options={"margin": 0.5}), num_classes=3)
    output, target = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 2])
    assert task.loss_sum(output, target).item() == pytest.approx((0.5 + 1.5) / 3, rel=1e-6)  # by hand; float32
    torch.testing.assert_close(task.loss_each(output, target).sum(), task.loss_sum(output, target))
    for task, output, target, wanted in module.CASES:
        metrics = task.metrics()
        metrics.update(task.answers(output), target)
        assert {name: metrics.compute()[name].item() for name in wanted} == wanted


def test_the_example_of_a_format_works(added, tmp_path):
    (config, train, evaluate, classes) = added("widefield/data/formats/npz.py").CASES[0]
    place = tmp_path / "place"
    place.mkdir()
    path = str(config["path"](place, lambda file: write_image(torch.zeros(3, 4, 4, dtype=torch.uint8), file)))
    dataset = data.open_dataset(DataConfig(name="npz", **{**config, "path": path}))
    assert (len(dataset.train), len(dataset.evaluate), len(dataset.classes)) == (train, evaluate, classes)
    arrays = np.load(path)
    image, label = dataset.evaluate.read(0)
    assert image.dtype == torch.uint8 and image.shape[0] == dataset.channels
    assert (image.permute(1, 2, 0).numpy() == arrays["images"][-evaluate]).all() and label == arrays["labels"][-evaluate]
    with pytest.raises(ValueError, match="there is no such file"):
        data.open_dataset(DataConfig(name="npz", path=str(tmp_path / "none.npz")))


def test_the_example_of_a_model_works(added):
    for options, shape, wanted in added("widefield/models/plain.py").CASES:
        model = models.build(ModelConfig(name="plain", options=options), in_channels=shape[1], num_classes=10)
        assert model(torch.zeros(shape)).shape == wanted


def test_the_example_of_a_launcher_works(added):
    for environment, wanted in added("widefield/launchers/jsrun.py").CASES:
        if isinstance(wanted, str):
            with pytest.raises(ValueError, match=wanted):
                launchers.world_from(environment)
        else:
            assert launchers.world_from(environment) == wanted


def test_the_example_of_a_failure_works(added):
    module = added("widefield/diagnosis/rules/wrong_backend.py")
    for text, seen in module.CASES:
        told = [failure for failure in diagnosis_of(evidence_of_text(text)).failures if failure.name == "wrong_backend"]
        assert len(told) == (seen is not None) and all(seen in failure.seen for failure in told)


def test_the_example_of_a_verb_works(added, tmp_path, capsys):
    module = added("widefield/cli/diff.py")
    for words, expected in module.CASES:
        options = cli.parse(["diff", *words])
        assert options.verb is module and {key: getattr(options, key) for key in expected} == expected
    text = "model: {name: resnet}\ndata: {name: digits}\n"
    paths = [tmp_path / "one.yaml", tmp_path / "other.yaml"]
    for path, more in zip(paths, ("", "seed: 3\n"), strict=True):
        path.write_text(text + more)
    assert cli.main(["diff", *map(str, paths)]) == 1 and capsys.readouterr().out == "seed: 0 -> 3\n"
    assert cli.main(["diff", str(paths[0]), str(paths[0])]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert re.search(f"  train .*\n    evaluate .*\n    diff +{module.SUMMARY}\n    predict ", capsys.readouterr().out)


def test_the_example_of_a_strategy_is_all_that_a_new_one_takes(tmp_path):
    compiled_now = shutil.ignore_patterns("*.pyc.*")  # Python's names for what it is about to write
    shutil.copytree(ROOT / "widefield", tmp_path / "widefield", ignore=compiled_now)
    path = "widefield/parallel/strategies/plain_average.py"
    (tmp_path / path).write_text(example(path), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", NEW_STRATEGY], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "replicate=2 over data, data_parallel, plain_average; torch: False",
        "plain_average averages whole copies and this mesh has replicate=2 x space=[2, 1]; set mesh.data_strategy=data",
        "widefield.parallel.strategies.plain_average",
    ]


NEW_STRATEGY = """
import sys
from widefield.config import RunConfig, parse_config
from widefield.plans import check, plan_of

def plan(*overrides, ranks):
    return plan_of(parse_config("model: {name: resnet}\\ndata: {name: digits}", overrides), ranks)

own = plan("mesh.data_strategy=plain_average", ranks=2)
known = RunConfig.model_json_schema()["$defs"]["MeshConfig"]["properties"]["data_strategy"]["enum"]
print(f"{own} over {', '.join(known)}; torch: {'torch' in sys.modules}")
check(own, ranks=2)
try:
    check(plan("mesh.data_strategy=plain_average", "mesh.space=[2,1]", ranks=4), ranks=4)
except NotImplementedError as error:
    print(error)
from widefield.parallel.parallelize import _strategies
print(*(strategy.__name__ for strategy in _strategies(own)))
"""


@pytest.mark.long
def test_the_example_of_a_strategy_gives_one_devices_gradient():
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    whole = _net()
    (whole(x) - y).square().sum().div(6).backward()
    for gradients in on_ranks(2, _gradients_under, example("widefield/parallel/strategies/plain_average.py"), x, y):
        for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)  # float64, sums of 6 products


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _gradients_under(mesh, source: str, x, y) -> list[torch.Tensor]:
    """Gradients of a net laid out by the strategy in `source`, on this rank's unequal share: 1 sample and 5."""
    names: dict[str, Any] = {"__name__": "plain_average"}
    exec(source, names)
    model = _net()
    assert all(isinstance(reason, str) for reason in names["apply"](model, mesh))
    share = slice(0, 1) if mesh.rank == 0 else slice(1, 6)
    ((model(x[share]) - y[share]).square().sum() * mesh.size / 6).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_the_example_of_an_optimizer_works(monkeypatch):
    names = _run_example("widefield/training/optimizer.py", vars(optimizer))
    monkeypatch.setitem(optimizer._OPTIMIZERS, "adagrad", names["ROW"])
    config = OptimizerConfig(name="adagrad")
    rate, _ = optimizer.learning_rate(config, 256)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    built = optimizer.build_optimizer(config, model, rate)
    model(torch.ones(1, 2)).sum().backward()
    built.step()
    assert isinstance(built, torch.optim.Adagrad) and not torch.equal(model.weight, before)


def test_the_example_of_a_schedule_works(monkeypatch):
    names = _run_example("widefield/training/schedule.py", vars(schedule))
    monkeypatch.setitem(schedule._CURVES, "rootdecay", names["ROW"])
    config = ScheduleConfig(name="rootdecay", length="100step", warmup="4step")
    curve = schedule.build_schedule(config, seen=lambda step: 10 * step, steps_per_epoch=5)
    assert [curve.factor(samples) for samples in (40, 160, 640)] == [1.0, 0.5, 0.25]  # by hand: sqrt(40 / samples)


def _run_example(path: str, known: dict[str, Any]) -> dict[str, Any]:
    names = dict(known)
    exec(example(path), names)
    return names


# ---------------------------------------------------------------------------------------------- the examples of one's own parts


def test_the_examples_of_own_parts_train_from_the_files_beside_a_recipe(tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    for name in ("mynets.py", "mydata.py", "mine.py"):
        (project / name).write_text(example(name))
    (recipe,) = [block.text for block in blocks("yaml") if block.text.startswith("# mine.yaml\n")]
    (project / "mine.yaml").write_text(recipe)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mynets", "mydata", "mine"):  # which other tests have of their own
        monkeypatch.delitem(sys.modules, name, raising=False)
    named = ["model.name=mynets:tiny", "data.name=mydata:striped", "data.options={count: 40}", "data.batch_size=8"]
    outcome = wf.train(project / "mine.yaml", *named, "data.workers=0", run=tmp_path / "run")
    assert set(outcome.evaluation.metrics) == {"top1", "MulticlassF1Score", "calibration"} and outcome.evaluation.of == 10
    rates = [line["lr"] for line in record.read(tmp_path / "run") if line["kind"] == "step"]
    assert rates[4:] == pytest.approx([0.05 * (30 / max(30, seen)) ** 0.5 for seen in (30, 38, 46, 54)])  # by hand
    state, _ = read(newest_sound_in(tmp_path / "run" / "checkpoints", warn=print))
    assert state["optimizer"]["kind"] == "Adagrad"
    for name in ("mynets", "mydata", "mine"):
        del sys.modules[name]  # monkeypatch would bring it back


def test_the_example_of_an_own_transform_works(tmp_path, monkeypatch):
    (tmp_path / "mytransforms.py").write_text(example("mytransforms.py"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (command,) = [block.text for block in blocks("bash") if "mytransforms:" in block.text]
    listed = yaml.safe_load(re.search(r"data.augment=(\[.*\])'", command)[1])
    (entry,) = Transforms(listed[1:], field="data.augment").steps
    image, labels = torch.full((1, 4, 4), 100, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
    made, kept = entry.run(image, labels)
    assert entry.is_pointwise and made.unique().numel() == 1 and made[0, 0, 0] != 100 and kept is labels
    del sys.modules["mytransforms"]  # monkeypatch would bring it back


@pytest.mark.parametrize("path", ["first.py", "verbs.py", "own_objects.py"])
def test_the_scripts_from_python_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "script"}
    exec(example(path), names)
    printed = capsys.readouterr().out
    if path == "own_objects.py":
        assert names["outcome"].run == Path("runs/own") and names["again"].metrics == names["outcome"].evaluation.metrics
        assert [answer.classes[0] for answer in names["answers"]] == ["plain", "striped"]
    else:
        assert "on 360/360 images" in printed and (path == "first.py") != ("replicate=2 x shard=2" in printed)


def test_a_loop_of_ones_own_prints_the_same_on_two_ranks_and_goes_on(tmp_path):
    source = example("own_loop.py")
    expected = _own_loop(None, source, str(tmp_path / "one"))
    for found in on_ranks(2, _own_loop, source, str(tmp_path / "two")):
        assert found[0] == pytest.approx(expected[0], rel=1e-10) and found[1] == pytest.approx(expected[1], rel=1e-10)
    assert len(expected[0]) == 4 and expected[0][-1] < 0.9 * expected[0][0] and expected[2:] == (30, 0)
    shorter = source.replace("range(len(losses), 4)", "range(len(losses), 2)")
    _own_loop(None, shorter, str(tmp_path / "three"))
    assert _own_loop(None, source, str(tmp_path / "three")) == expected  # resumed, bit for bit


def _own_loop(mesh, source: str, folder: str):
    Path(folder).mkdir(exist_ok=True)
    names: dict[str, Any] = {"__name__": "own_loop"}
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            exec(source, names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names["losses"], names["found"].values, names["found"].images, names["found"].duplicates


# ---------------------------------------------------------------------------------------------- the examples of tiles


def test_the_example_of_tiles_gives_one_devices_gradients_and_answer():
    answer, gradients = _example_of_tiles(None, example("tiles.py").replace("space=(2, 1)", "space=(1, 1)"))
    for found_answer, found in on_ranks(2, _example_of_tiles, example("tiles.py")):
        torch.testing.assert_close(found_answer, answer, rtol=1e-12, atol=1e-12)  # float64, windows of 72 products
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=name)  # sums over 95,000 pixels


def _example_of_tiles(mesh, source: str):
    names: dict[str, Any] = {"__name__": "tiles"}
    torch.set_default_dtype(torch.float64)
    try:
        exec(source, names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names["answer"].detach(), {name: p.grad.clone() for name, p in names["model"].named_parameters()}


def test_the_example_of_stages_learns_as_one_device():
    alone = _loss_of_stages(None, example("stages.py").replace("stage=2", "stage=1"))
    for loss in on_ranks(2, _loss_of_stages, example("stages.py")):
        assert loss == pytest.approx(alone, rel=1e-12)


def _loss_of_stages(mesh, source: str) -> float:
    names: dict[str, Any] = {"__name__": "stages"}
    torch.set_default_dtype(torch.float64)
    try:
        exec(source, names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names["loss"].item()


@pytest.mark.parametrize("path", ["stream.py", "loss_inside.py", "slide.py", "answers.py"])
def test_the_examples_of_streams_give_what_the_whole_run_gives(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(3 * 1000 * 800).astype(np.uint8).tofile("slide.raw")
    monkeypatch.setattr(wf, "from_reader", partial(wf.from_reader, dtype=torch.float64))
    called, forward = [], Streamed.forward
    monkeypatch.setattr(Streamed, "forward", lambda self, *images: called.append(self._stream.tiles) or forward(self, *images))
    answer, gradients = _example_of_streams(path)
    assert called in ([(4, 3)], [(4, 4)], [(8, 8)])
    monkeypatch.setattr(wf, "stream", lambda module, *, tiles: module)
    monkeypatch.setattr(wf, "from_reader", lambda read, shape: torch.from_numpy(read(...).copy()).double())
    expected, of_the_whole = _example_of_streams(path)
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    assert len(called) == 1 and [name for name in gradients if gradients[name] is None] == (
        list(gradients) if path == "answers.py" else []
    )
    for name, gradient in of_the_whole.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


def _example_of_streams(path: str):
    names: dict[str, Any] = {"__name__": "stream"}
    torch.set_default_dtype(torch.float64)
    try:
        exec(example(path), names)
    finally:
        torch.set_default_dtype(torch.float32)
    answer = names["answer"] if "answer" in names else names["loss"]
    return answer.detach(), {name: p.grad for name, p in names["net"].named_parameters()}


@pytest.mark.parametrize("name", ["box_sum", "energy"])
def test_the_examples_of_rules_are_exact(name):
    for verdict in on_ranks(2, _verdict_on_a_rule, example(f"widefield/ops/{name}.py"), plan=Plan(space=[2, 1])):
        assert verdict.ok and {row.kind for row in verdict.rows} == {"layer", "output", "gradient"}, str(verdict)


class _Calls(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.call(image)


def _verdict_on_a_rule(mesh, source: str):
    names: dict[str, Any] = {"__name__": "rule", "__annotations__": {}}
    exec(source, names)
    (case,) = names["CASES"]
    return compare(_Calls(case.run), case.shapes[0], mesh, cuts=[[0, 7, 18], None])


def test_every_name_in_the_api_page_can_be_imported_and_explains_itself():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name
