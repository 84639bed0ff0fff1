"""A run folder from a stranger runs no code, whatever lies in it, and reaches nothing outside of it."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from command import DIGITS
from PIL import EpsImagePlugin, Image

from widefield.cli import main
from widefield.launchers import local
from widefield.training import manifest

SHORT = ["schedule.warmup=0step", "log.tensorboard=false", "checkpoint.every=1step", "evaluate.every=1000step"]
MYNETS = """
from torch import nn

def tiny(in_channels, num_classes, width=4):
    return nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """A run of two steps with two checkpoints, as anybody could leave and pass on; and an image beside it."""
    place = tmp_path_factory.mktemp("honest")
    assert main(["train", DIGITS, *SHORT, "schedule.length=2step", "--run", str(place / "run")]) == 0
    Image.new("L", (8, 8), 99).save(place / "scan.png")
    return place / "run"


@pytest.fixture
def run(honest, tmp_path) -> Path:
    """A copy to be tampered with."""
    shutil.copy(honest.parent / "scan.png", tmp_path)
    return Path(shutil.copytree(honest, tmp_path / "run"))


@pytest.fixture
def trace(tmp_path) -> Path:
    """What every bomb makes; at the end it must not be there."""
    path = tmp_path / "trace"
    yield path
    assert not path.exists()


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def goes_off(trace: Path, use: Callable[[], object]) -> None:
    """The bomb is one: where it is used it leaves its trace, which is taken away again."""
    use()
    assert trace.exists()
    trace.rmdir()


def said(capsys, *arguments: str | Path, status: int = 2) -> str:
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def verbs(run: Path) -> list[list[str | Path]]:
    """Everything that builds the model of a run folder."""
    return [
        ["evaluate", run],
        ["predict", run, run.parent / "scan.png"],
        ["export", run, "--output", run.parent / "out" / "model.safetensors"],
        ["train", run / "config.yaml", "--run", run.parent / "other"],
        ["bench", run / "config.yaml", "--out", run.parent / "bench"],
    ]


def resume(run: Path) -> list[str | Path]:
    return ["train", DIGITS, *SHORT, "schedule.length=3step", "--run", run]


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_00000002"


def seal(place: Path) -> None:
    """Write a checkpoint's hashes anew, as a forger does."""
    manifest.write_manifest(place, manifest.hashes_of(place, [p.name for p in place.iterdir() if p.name != "manifest.sha256"]))


def bombs(trace: Path) -> dict[str, bytes]:
    """A pickle, as torch.save writes it in both of its forms, and alone."""
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save(Bomb(trace), zipped)
    torch.save(Bomb(trace), legacy, _use_new_zipfile_serialization=False)
    return {"zip": zipped.getvalue(), "legacy": legacy.getvalue(), "pickle": pickle.dumps(Bomb(trace))}


# ---------------------------------------------------------------------------------------------- checkpoints


WEIGHTS = ("weights.safetensors", "best.safetensors")


@pytest.mark.long
def test_a_list_of_tensors_in_a_pickle_is_refused(run, trace, capsys):
    place, bomb = newest(run), bombs(trace)["pickle"]
    goes_off(trace, lambda: pickle.loads(bomb))
    (place / ".metadata").write_bytes(bomb)
    (place / "tensors.json").unlink()
    seal(place)
    for name in WEIGHTS:
        (run / name).unlink()
    for arguments in (resume(run), *verbs(run)[:3]):
        text = said(capsys, *arguments)
        assert "kept the list of its tensors in a pickle (.metadata); reading one can run any code" in text


def test_a_pickle_that_nothing_names_is_not_read(run, trace, capsys):
    for place in (newest(run), run, run / "checkpoints"):
        for name in (".metadata", "model.pt", "weights.pt", "__0_0.distcp"):
            (place / name).write_bytes(bombs(trace)["pickle"])
    assert "resumed from" in said(capsys, *resume(run), status=0)
    assert "images" in said(capsys, "evaluate", run, status=0)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_pickles_in_place_of_tensors_and_texts_are_refused(form, run, trace, capsys):
    bomb = bombs(trace)[form]
    goes_off(trace, lambda: pickle.loads(bomb) if form == "pickle" else torch.load(io.BytesIO(bomb), weights_only=False))
    for name in WEIGHTS:
        (run / name).write_bytes(bomb)
    for arguments in verbs(run)[:3]:
        assert "is no sound .safetensors file" in said(capsys, *arguments)
    for name in WEIGHTS:
        (run / name).unlink()
    place = newest(run)
    for name in sorted(p.name for p in place.iterdir() if p.name.startswith(("tensors_", "plain", "own_"))):
        before = (place / name).read_bytes()
        (place / name).write_bytes(bomb)
        seal(place)
        assert "is as its hashes say, and not what widefield writes" in said(capsys, *resume(run)), name
        (place / name).write_bytes(before)
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    for name in ("about.json", "tensors.json"):
        before = (place / name).read_bytes()
        (place / name).write_bytes(bomb)
        seal(place)
        text = said(capsys, "evaluate", run)
        assert f"{name} is" in text and "not what this version of widefield writes" in text and "a sound checkpoint" in text
        (place / name).write_bytes(before)


FORGED = {
    "no such tensor": lambda state, index: state["model"].update({"stem.0.weight": {"$tensor": {"name": "nowhere"}}}),
    "a number for a tensor": lambda state, index: state["model"].update({"stem.0.weight": 1}),
    "strides out of it": lambda state, index: _first(state)["$tensor"].update(stride=[10**9, 1, 1, 1]),
    "strides that are none": lambda state, index: _first(state)["$tensor"].update(stride="os:system"),
    "no progress": lambda state, index: state.pop("progress"),
    "a text for a count": lambda state, index: state["progress"].update(step="os:system"),
    "no groups": lambda state, index: state["optimizer"].update(groups={}),
    "another shape": lambda state, index: next(iter(index.values())).update(shape=[10**6]),
    "another dtype": lambda state, index: next(iter(index.values())).update(dtype="float64"),
    "bits of a float": lambda state, index: state.update(scaler={"$float": "zz"}),
}


def _first(state: dict) -> dict:
    return next(value for value in state["model"].values() if "$tensor" in value)


@pytest.mark.parametrize("what", FORGED)
def test_a_state_that_somebody_made_up_is_refused(what, run, capsys):
    place = newest(run)
    state, index = (json.loads((place / name).read_text()) for name in ("plain.json", "tensors.json"))
    FORGED[what](state, index)
    for name, value in (("plain.json", state), ("tensors.json", index)):
        (place / name).write_text(json.dumps(value))
    seal(place)
    text = said(capsys, *resume(run))
    assert "not what widefield writes" in text or "does not hold the state of a run" in text


@pytest.mark.parametrize("name", ["../step_00000001/tensors_0.safetensors", "/tensors_0.safetensors", "plain.json", "..", 3])
def test_an_index_that_names_another_file_is_passed_over(name, run, capsys):
    index = json.loads((newest(run) / "tensors.json").read_text())
    next(iter(index.values()))["file"] = name
    (newest(run) / "tensors.json").write_text(json.dumps(index))
    seal(newest(run))
    text = said(capsys, *resume(run), status=0)
    assert "not what this version of widefield writes: tensors.json says of " in text and "step_00000001 at step 1" in text


@pytest.mark.parametrize("name", ["../secret.txt", "..", "/secret.txt", ".metadata"])
def test_a_manifest_that_names_another_file_cannot_be_relied_on(name, run, capsys):
    path = newest(run) / "manifest.sha256"
    path.write_text(f"{'0' * 64}  {name}\n{path.read_text()}")
    text = said(capsys, *resume(run), status=0)
    assert "manifest.sha256 cannot be relied on: line 1" in text and "step_00000001 at step 1" in text


# ---------------------------------------------------------------------------------------------- names of code


def set_in(path: Path, **values) -> None:
    """Change keys of a YAML file, dotted by `__`."""
    config = yaml.safe_load(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(yaml.safe_dump(config))


def test_code_that_a_run_folder_names_is_not_run(run, trace, capsys):
    set_in(run / "config.yaml", model__name="os:system", model__options={"command": f"mkdir {trace}"})
    for arguments in verbs(run):
        text = said(capsys, *arguments)
        assert f"model.name is 'os:system', code of its own, and {run / 'config.yaml'} lies in the run folder {run}" in text
        assert "nothing of it was run. If you trust that folder add --trust, or name the code yourself" in text
    goes_off(trace, lambda: said(capsys, "evaluate", run, "--trust"))
    goes_off(trace, lambda: said(capsys, "evaluate", run, "model.name=os:system"))
    said(capsys, "evaluate", run, "model.options.more=1")
    assert "name: os:system" in said(capsys, "train", run / "config.yaml", "--print-config", status=0)
    (run / "recipes").mkdir()
    shutil.copy(run / "config.yaml", run / "recipes" / "mine.yaml")
    (run.parent / "linked.yaml").symlink_to(run / "config.yaml")
    for recipe in (run / "recipes" / "mine.yaml", run.parent / "linked.yaml"):
        assert "nothing of it was run" in said(capsys, "train", recipe)


NAMING = {
    "data__name": ["evaluate", "train", "bench"],
    "task__name": ["evaluate", "predict", "export", "train", "bench"],
    "task__metrics": ["evaluate", "predict", "export", "train", "bench"],
    "task__loss": ["evaluate", "train", "bench"],
    "optimizer__name": ["train", "bench"],
    "schedule__name": ["train", "bench"],
}
"""Keys that may name code of the user's own, and the verbs that would build what they name."""


@pytest.mark.parametrize("key", NAMING)
def test_code_that_a_run_folder_names_for_any_part_is_not_run(key, run, trace, monkeypatch, capsys):
    (run.parent / "bomb.py").write_text(f"import os\nos.mkdir({str(trace)!r})\noff = None\n")
    monkeypatch.syspath_prepend(run.parent)
    name = ["bomb:off"] if key == "task__metrics" else "bomb:off"
    set_in(run / "config.yaml", **{key: name})
    dotted = key.replace("__", ".")
    for verb, *words in verbs(run):
        if verb in NAMING[key]:
            text = said(capsys, verb, *words)
            assert f"{dotted} is '" in text and "bomb:off" in text and "code of its own" in text, verb
            assert "nothing of it was run. If you trust that folder add --trust, or name the code yourself" in text
    verb, *words = next(words for words in verbs(run) if words[0] in NAMING[key] and words[0] != "bench")
    goes_off(trace, lambda: said(capsys, verb, *words, "--trust"))
    sys.modules.pop("bomb")
    if "evaluate" not in NAMING[key]:  # an evaluation builds no optimizer, so what names one does not matter
        assert "top-1" in said(capsys, "evaluate", run, status=0)


def test_a_folder_with_nothing_but_a_recipe_and_weights_is_a_run_folder_where_it_is_given_as_one(run, trace, capsys):
    set_in(run / "config.yaml", model__name="os:system", model__options={"command": f"mkdir {trace}"})
    for path in run.iterdir():
        if path.name not in ("config.yaml", "checkpoints"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "checkpoints").rename(run / "kept")
    for arguments in verbs(run)[:3]:
        assert "nothing of it was run" in said(capsys, *arguments)
    assert "nothing of it was run" in said(capsys, "train", run / "config.yaml", "--run", run)


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"])
def test_pickles_that_timm_would_load_for_a_run_folder_are_not_read(option, run, trace, capsys):
    (run / "weights.pth").write_bytes(bombs(trace)["zip"])
    value = str(run / "weights.pth") if option == "checkpoint_path" else {"file": str(run / "weights.pth")}
    set_in(run / "config.yaml", model__name="timm/test_resnet", model__options={option: value, "pretrained": True})
    for arguments in verbs(run):
        text = said(capsys, *arguments)
        assert f"model.options.{option} is " in text and "nothing was loaded. If you trust that folder add --trust" in text


@pytest.mark.parametrize("name", ["os:system", "os.system", "torch/hub", "../../evil", "nn.Linear", "subprocess:run"])
@pytest.mark.parametrize("key", ["task__name", "data__name", "optimizer__name", "schedule__name", "mesh__data_strategy"])
def test_other_names_are_those_of_this_package(key, name, run, trace, capsys):
    set_in(run / "config.yaml", **{key: name})
    if key.split("__")[0] in ("task", "data", "mesh"):
        assert name in said(capsys, "evaluate", run)
    assert name in said(capsys, "train", run / "config.yaml", "--run", run.parent / "other")


@pytest.mark.parametrize(
    "values",
    [
        {"data__read_evaluate": [{"Lambda": {"lambd": "os.system"}}]},
        {"data__read_evaluate": [{"os.system": {"command": "true"}}]},
        {"data__read_evaluate": ["__import__('os').system('true')"]},
        {"data__options": {"path": "os:system"}},
        {"task__options": {"label_smoothing": "os:system"}},
        {"model__options": {"blocks": "os:system"}},
    ],
)
def test_arguments_are_values_and_nothing_more(values, run, monkeypatch, capsys):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it was run"))
    set_in(run / "config.yaml", **values)
    assert said(capsys, "evaluate", run)


def test_tags_of_yaml_that_make_objects_are_refused(run, trace, capsys):
    bomb = f"!!python/object/apply:os.mkdir ['{trace}']"
    goes_off(trace, lambda: yaml.unsafe_load(bomb))
    for name in ("config.yaml", "plan.yaml"):
        (run / name).write_text(f"{(run / name).read_text()}extra: {bomb}\n")
    for arguments in verbs(run):
        assert "is not YAML: could not determine a constructor" in said(capsys, *arguments)
    assert "is not YAML: could not determine a constructor" in said(
        capsys, "verify", "resnet", "--image", "1x8x8", "--plan", run / "plan.yaml"
    )
    assert said(capsys, "report", run, status=0)


def test_plans_overrides_and_reasons_are_texts(run, trace, capsys):
    code = f"__import__('os').mkdir('{trace}')"
    plan = {"sharding": {"units": ["os:system", code]}, "pipeline": {"stages": [code]}, "recompute": {"blocks": [code]}}
    (run / "plan.yaml").write_text(yaml.safe_dump(plan))
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    lines[0] |= {"plan": yaml.safe_dump(plan), "reasons": [code], "overrides": ["model.name=os:system"]}
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert said(capsys, "report", run, status=0)
    set_in(run / "config.yaml", sharding__units=[code], pipeline__stages=[code], recompute={"blocks": [code]})
    assert said(capsys, "evaluate", run, status=0)


# ---------------------------------------------------------------------------------------------- the user's own


@pytest.mark.long
def test_a_users_own_code_is_trained_resumed_evaluated_and_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "mynets.py").write_text(MYNETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mynets", raising=False)  # another test's of this process
    run, own = tmp_path / "mine", ["model.name=mynets:tiny", "model.options={width: 5}"]
    Image.new("L", (8, 8), 99).save(tmp_path / "scan.png")
    for length in (1, 2):
        text = said(capsys, "train", DIGITS, *own, *SHORT, f"schedule.length={length}step", "--run", run, status=0)
    assert "resumed from" in text
    recipe = tmp_path / "mine.yaml"
    shutil.copy(run / "config.yaml", recipe)
    assert "resumed from" in said(capsys, "train", recipe, "schedule.length=3step", "--run", run, status=0)
    assert "resumed from" in said(capsys, "train", run / "config.yaml", *own, "schedule.length=4step", "--run", run, status=0)
    for arguments in verbs(run)[:3]:
        assert "name the code yourself: model.name=mynets:tiny" in said(capsys, *arguments)
        assert said(capsys, *arguments, "--trust", status=0)
    assert "top-1" in said(capsys, "evaluate", run, "model.name=mynets:tiny", status=0)
    del sys.modules["mynets"]  # monkeypatch would bring it back


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_ranks_that_are_started_for_a_trusted_folder_trust_it_too(verb, run, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(local, "start", lambda ranks, arguments, **_: started.append((ranks, arguments)) or 0)
    arguments = [verb, *([run / "config.yaml", "--run", run.parent / "other"] if verb == "train" else [run])]
    for trust in ([], ["--trust"]):
        said(capsys, *arguments, "mesh.replicate=2", *trust, status=0)
    assert [(ranks, words.count("--trust")) for ranks, words in started] == [(2, 0), (2, 1)]


def test_weights_that_training_started_from_are_not_asked_for_again(run, capsys):
    set_in(run / "config.yaml", model__weights="/nowhere/pretrained.safetensors")
    assert "top-1" in said(capsys, "evaluate", run, status=0)


# ---------------------------------------------------------------------------------------------- paths and pictures


@pytest.mark.long
def test_pictures_outside_of_the_folder_are_not_in_the_report(run, capsys):
    secret = run.parent / "secret.png"
    Image.effect_noise((16, 16), 80).save(secret)
    shutil.copy(secret, run / "mistakes" / "inside.png")
    evaluation = json.loads((run / "evaluation.json").read_text())
    template = {"id": "a", "truth": "0", "prediction": "1", "probability": 0.5, "loss": 1.0}

    def shown(name: object) -> int:
        evaluation["mistakes"] = [{**template, "picture": name}]
        evaluation["samples"] = [
            dict.fromkeys(("image", "truth", "prediction"), name) | {"id": "a", "size": [16, 16], "right": 1, "counted": 2}
        ]
        (run / "evaluation.json").write_text(json.dumps(evaluation))
        said(capsys, "report", run, status=0)
        return (run / "report.html").read_text().count("data:image/png;base64,")

    assert shown("mistakes/inside.png") >= 1
    for name in (str(secret), "../secret.png", "mistakes/../../secret.png", "mistakes", "", "\0", 7, None, ["a"]):
        assert shown(name) == 0, name
    assert base64.b64encode(secret.read_bytes())[:60].decode() not in (run / "report.html").read_text()


def test_a_picture_that_is_a_program_is_not_handed_to_ghostscript(run, trace, monkeypatch, capsys):
    programs = run.parent / "programs"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\n/bin/mkdir -p {trace}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    Image.new("L", (8, 8)).save(run.parent / "a.eps")
    goes_off(trace, lambda: _drawn(run.parent / "a.eps"))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    evaluation = json.loads((run / "evaluation.json").read_text())
    for mistake in evaluation["mistakes"]:
        shutil.copy(run.parent / "a.eps", run / mistake["picture"])
    assert evaluation["mistakes"] and "report.html" in said(capsys, "report", run, status=0)
    assert "picture missing" in (run / "report.html").read_text()
    assert "EPS may hold a program" in said(capsys, "predict", run, run.parent / "a.eps", status=1)


def _drawn(path: Path) -> None:
    with pytest.raises(OSError), Image.open(path) as image:
        image.load()


LINKED = [
    "config.yaml", "record.jsonl", "evaluation.json", "model.json", "weights.safetensors", "summary.csv", "report.html",
    "report.html.part", "weights.part", ".lock", "mistakes/00.png", "checkpoints/step_00000002/plain.json",
]  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_the_folder_are_neither_read_nor_written_through(name, run, capsys):
    victim = run.parent / "victim"
    (run / name).parent.mkdir(exist_ok=True)
    if (run / name).exists():
        shutil.move(run / name, victim)
    else:
        victim.write_text("the user's")
    (run / name).symlink_to(victim)
    before = victim.read_bytes()
    for arguments in (*verbs(run)[:3], resume(run), ["report", run]):
        text = said(capsys, *arguments)
        assert f"{run / name} is a link to {victim}, out of the run folder {run}" in text
    assert victim.read_bytes() == before


@pytest.mark.parametrize("name", ["mistakes", "checkpoints", "samples", "tensorboard"])
def test_folders_that_lead_out_of_the_folder_are_refused(name, run, capsys):
    victim = run.parent / "pictures"
    victim.mkdir()
    (victim / "99.png").write_text("the user's")
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(victim)
    for arguments in (*verbs(run)[:3], resume(run), ["report", run]):
        assert f"{run / name} is a link to " in said(capsys, *arguments)
    assert [path.name for path in victim.iterdir()] == ["99.png"]


def test_links_within_a_run_folder_and_to_one_are_as_good_as_the_files(run, capsys):
    (run / "checkpoints").rename(run / "kept")
    (run / "checkpoints").symlink_to("kept")
    (run.parent / "linked").symlink_to(run)
    assert "resumed from" in said(capsys, *resume(run.parent / "linked"), status=0)


def test_names_of_classes_reach_the_terminal_as_text(run, capsys):
    model = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(model | {"classes": ["\x1b]0;pwned\x07\x1b[2J"] * 10}))
    text = said(capsys, "predict", run, run.parent / "scan.png", status=0)
    assert "\x1b" not in text and "\\x1b]0;pwned" in text


@pytest.mark.parametrize("text", ["{}", "[]", '{"image": ["a"], "classes": [], "mean": [], "std": []}', "[" * 99999, "x"])
def test_a_damaged_model_is_refused_by_name(text, run, capsys):
    (run / "model.json").write_text(text)
    for arguments in verbs(run)[1:3]:
        assert f"{run / 'model.json'} is damaged" in said(capsys, *arguments)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_random_states_that_somebody_made_up_are_refused(name, run, capsys):
    own = json.loads((newest(run) / "own_0.json").read_text())
    own["random"][name] = {"version": 3, "words": ["os:system"], "gauss": None, "name": "x", "keys": 1, "rest": []}
    (newest(run) / "own_0.json").write_text(json.dumps(own))
    seal(newest(run))
    assert "the checkpoint's random states are none of these generators'" in said(capsys, *resume(run))


def test_a_rank_s_own_state_that_somebody_made_up_is_refused(run, capsys):
    (newest(run) / "own_0.json").write_text('{"random": {}}')
    seal(newest(run))
    assert "does not hold the state of a run (its names, shapes or counts" in said(capsys, *resume(run))


@pytest.mark.parametrize("line", [{"kind": "step", "step": "os:system"}, {"kind": "evaluation", "step": 1}])
def test_a_record_that_somebody_made_up_is_not_gone_on_with(line, run, capsys):
    with (run / "record.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    before = (run / "record.jsonl").read_bytes()
    assert "record.jsonl holds values that widefield does not write" in said(capsys, *resume(run))
    assert (run / "record.jsonl").read_bytes() == before


@pytest.mark.parametrize("line", [{"kind": "end"}, {"kind": "step"}, {"kind": "start", "plan": 3}, {"kind": "evaluation"}])
def test_a_record_that_somebody_made_up_is_refused(line, run, capsys):
    with (run / "record.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "holds values that widefield does not write, so there is no report of it" in said(capsys, "report", run)
