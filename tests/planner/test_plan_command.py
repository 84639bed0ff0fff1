"""`widefield plan`, wf.plan and mesh.auto on real models, whose steps are emulated."""

from __future__ import annotations

import json

import pytest
import yaml
from command import DIGITS, record, run
from torch import nn

import widefield as wf
from widefield.cli import main
from widefield.config import parse_config, read_config
from widefield.planner.emulation import CannotEmulate
from widefield.planner.machines import cluster_of
from widefield.planner.search import automatic
from widefield.planner.search.ask import PlanRequest, ask, image_of, on_device
from widefield.planner.search.automatic import cluster_here, planned_run, predict_into, predicted_run
from widefield.plans import plan_of
from widefield.training.given import NOTHING
from widefield.training.planned import PlannedRun, read_planned, write_planned

FAST = ("model.options={widths: [4, 8], blocks: 1}", "data.batch_size=8")


def said(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_recipe_is_planned_and_json_and_function_say_the_same(tmp_path, capsys):
    words = [DIGITS, *FAST, "--cluster", "cpu:2", "--seconds", "4"]
    tree = json.loads(said(capsys, *words, "--json", "--out", str(tmp_path / "out")))
    assert tree["cluster"]["ranks"] == 2 and tree["image"] == [1, 8, 8] and tree["batch"] == 8
    best = tree["best"]
    assert best["state"] == "fits" and best["seconds"] > 0
    assert sum(best["memory"][0]["parts"].values()) == best["memory"][0]["peak_memory_bytes"] > 0
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == tree
    assert (tmp_path / "out" / "plan.html").read_text().startswith("<!doctype html>")
    answer = wf.plan(DIGITS, *FAST, cluster="cpu:2", seconds=4)
    first = {plan["name"]: plan for plan in answer.to_tree()["plans"]}
    both = [(plan, first[plan["name"]]) for plan in tree["plans"] if plan["name"] in first and plan["state"] == "fits"]
    assert both
    for one, other in both:
        assert all(one[key] == other[key] for key in ("peak_memory_bytes", "seconds", "message_bytes", "plan", "overrides"))


def test_a_machine_is_measured_without_a_recipe(capsys, monkeypatch):
    monkeypatch.setattr("widefield.planner.machines.calibrate.calibrate", lambda *, device, say: say(f"kept: {device}"))
    lines = said(capsys, "--calibrate").splitlines()
    assert lines[0].startswith("kept: c")
    assert lines[1:] == ["plans take it from there: widefield plan my.yaml --cluster measured"]


@pytest.mark.long
def test_the_table_has_the_choice_and_its_reasons(capsys):
    text = said(capsys, DIGITS, *FAST, "--cluster", "cpu:2", "--seconds", "3", "--top", "2")
    assert "2 devices with" in text and "plan: " in text and "scaling: " in text
    assert text.index("ms/step") < text.index("plan: ")


@pytest.mark.long
def test_a_models_name_and_an_image_stand_in_for_a_recipe(capsys):
    words = ["unet", "model.options={widths: [4, 8]}", "--image", "1x32x40", "--batch", "2", "--cluster", "2xRTX4090"]
    tree = json.loads(said(capsys, *words, "--seconds", "3", "--json"))
    assert tree["precision"] == "bfloat16" and "segmentation" in tree["data"] and tree["image"] == [1, 32, 40]
    memory = tree["plans"][0]["memory"][0]
    assert memory["total_bytes"] >= memory["reserved_bytes"] >= memory["peak_memory_bytes"]


def test_images_of_the_command_line_take_the_place_of_the_recipes():
    found = ask(PlanRequest(DIGITS, "cpu:1", FAST, image=(1, 16, 16), classes=3, seconds=1, scales=False))
    assert found.image == (1, 16, 16) and "3 classes, classification" in found.data


def test_a_module_is_planned_as_it_is():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    recipe = {"data": {"name": "digits"}, "model": {"name": "resnet"}}
    answer = wf.plan(recipe, cluster="cpu:1", model=net, seconds=1, scales=False)
    assert answer.best is not None and answer.best.fullest.parts["weights"] == 4 * sum(p.numel() for p in net.parameters())


def test_what_fits_nowhere_is_told_with_what_is_missing(capsys):
    words = ["unet", "model.options={widths: [64, 128]}", "--image", "1x40000x40000", "--batch", "1", "--cluster", "1xT4"]
    text = said(capsys, *words, "--seconds", "1", status=1)
    assert "no plan fits 1 device with" in text and "per device are missing" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "name a recipe or a model, as: widefield plan digits --cluster cpu:2"),
        (["digits"], "name the machines, as --cluster 4x8xH100-80G"),
        (["digits", "--cluster", "8xH1000"], "no device 'h1000' in the catalogue"),
        (["digits", "--cluster", "cpu:2", "--classes", "3"], "--classes and --task are about stand-in images; give --image"),
        (["digits", "--cluster", "cpu:2", "data.batch_size=auto"], "data.batch_size=auto has no plan before it is found"),
        (["unet", "--cluster", "cpu:2", "--image", "64"], "--image has 1 number; write channels and the pixels of each side"),
        (["unett", "--cluster", "cpu:2", "--image", "1x32x32"], "unett"),
        (["timm/resnet5o", "--cluster", "cpu:1", "--image", "3x32x32"], "resnet5o"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(words, error, capsys):
    assert error in said(capsys, *words, status=2)


def test_the_function_refuses_what_it_does_not_take():
    with pytest.raises(ValueError, match=r"wf.plan takes no largset; did you mean 'largest'\?"):
        wf.plan("digits", cluster="cpu:1", largset=("batch",))
    with pytest.raises(ValueError, match=r"image: for plans of machines; name them too"):
        wf.plan("unet", image=(1, 32, 32))
    with pytest.raises(ValueError, match="--largest model is no question"):
        wf.plan("digits", cluster="cpu:1", largest=("model",))
    with pytest.raises(ValueError, match="--price is -1"):
        wf.plan("digits", cluster="cpu:1", dollars_per_hour=-1.0)


def test_an_out_folder_that_is_a_runs_is_refused(tmp_path):
    from widefield.report.plan_page import write_plan

    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match="is a run folder"):
        write_plan(tmp_path, {})


@pytest.mark.parametrize(
    ("cluster", "asked", "precision", "channels_last"),
    [("8xA100", "null", "bfloat16", True), ("8xV100-16G", "null", "float16", True), ("cpu:2", "null", "float32", None),
     ("8xA100", "float32", "float32", None)],
)  # fmt: skip
def test_precision_and_memory_format_are_those_that_a_run_there_would_choose(cluster, asked, precision, channels_last):
    config = read_config(DIGITS, [f"precision={asked}"])
    found = on_device(config, cluster_of(cluster), dims=2)
    assert (found.precision, found.model.channels_last) == (precision, channels_last)
    assert on_device(config, cluster_of(cluster), dims=3).model.channels_last is None


def test_the_image_is_the_one_that_the_model_gets():
    assert image_of(read_config(DIGITS), NOTHING) == ((1, 8, 8), 10, "classification")
    cropped = parse_config("model: {name: unet}\ndata: {name: page, patches: {size: [64, 32]}}\ntask: {name: segmentation}")
    assert image_of(cropped, NOTHING) == ((1, 64, 32), 11, "segmentation")


# ---------------------------------------------------------------------------------------------- mesh.auto


@pytest.mark.long
@pytest.mark.alone
def test_a_run_with_mesh_auto_prints_its_choice_keeps_it_and_goes_on_with_it(tmp_path):
    folder = tmp_path / "run"
    words = ("train", DIGITS, "mesh.auto=true", *FAST, "--run", folder)
    text = run(*words, "schedule.length=3step", "schedule.warmup=0step")
    assert text.count("mesh.auto: ") >= 2 and "s a step, " in text
    planned = read_planned(folder)
    assert planned is not None and planned.reasons[0] in text
    start = record(folder, "start")[-1]
    assert start["prediction"]["plan"] == planned.prediction["plan"] and start["prediction"]["peak_memory_bytes"] > 0
    assert any(reason.startswith("mesh.auto: ") for reason in start["reasons"])
    kept = yaml.safe_load((folder / "config.yaml").read_text())["mesh"]
    assert not kept["auto"] and kept["replicate"] is not None
    page = (folder / "report.html").read_text()
    assert "Predicted and measured" in page and "a step, without waiting for data" in page


@pytest.mark.long
def test_a_run_is_planned_anew_on_other_machines_and_for_another_recipe(tmp_path, monkeypatch):
    config, heard = read_config(DIGITS, [*FAST, "mesh.auto=true"]), []
    monkeypatch.setattr(automatic, "SECONDS", 1.0)
    first = planned_run(config, tmp_path, ranks=1, say=heard.append)
    assert first.applied(config).mesh.auto is False and plan_of(first.applied(config), 1).ranks == 1
    heard.clear()
    assert planned_run(config, tmp_path, ranks=1, say=heard.append) == first
    assert heard == [f"mesh.auto: as planned when this run began: {' '.join(first.overrides)}"]
    heard.clear()
    second = planned_run(config, tmp_path, ranks=2, say=heard.append)
    assert "planned anew for cpu:2: the run was planned for cpu:1" in heard[0]
    assert plan_of(second.applied(config), 2).ranks == 2 and read_planned(tmp_path) == second


def test_a_damaged_plan_is_made_anew(tmp_path):
    write_planned(tmp_path, PlannedRun("key", "cpu:1", []))
    assert read_planned(tmp_path) is not None
    (tmp_path / "planned.json").write_text('{"key": 3')
    assert read_planned(tmp_path) is None


def test_a_run_of_its_own_plan_can_be_predicted():
    found = predicted_run(read_config(DIGITS, [*FAST, "mesh.space=[2,1]", "mesh.replicate=1"]), ranks=2)
    assert found.prediction["plan"] == "space=[2, 1]" and found.prediction["seconds"] > 0
    with pytest.raises(ValueError, match="copies of the model share a batch"):
        predicted_run(read_config(DIGITS, [*FAST, "data.batch_size=1", "mesh.replicate=2"]), ranks=2)


def test_a_prediction_is_made_once_and_leaves_a_chosen_plan_alone(tmp_path):
    config = read_config(DIGITS, [*FAST, "log.predict=true"])
    predict_into(tmp_path, config, ranks=1)
    first = (tmp_path / "planned.json").stat().st_mtime_ns
    predict_into(tmp_path, config, ranks=1)
    assert (tmp_path / "planned.json").stat().st_mtime_ns == first
    chosen = PlannedRun("another recipe's", "cpu:1", [], reasons=["it is the fastest"])
    write_planned(tmp_path, chosen)
    predict_into(tmp_path, config, ranks=1)
    assert read_planned(tmp_path) == chosen


@pytest.mark.long
@pytest.mark.alone
def test_a_run_that_is_to_be_predicted_records_it_or_says_why_not(tmp_path):
    words = ("train", DIGITS, *FAST, "mesh.replicate=2", "log.predict=true", "schedule.length=3step", "schedule.warmup=0step")
    run(*words, "--run", tmp_path / "run")
    start = record(tmp_path / "run", "start")[-1]
    assert start["prediction"]["plan"] == "replicate=2" and start["prediction"]["seconds"] > 0
    assert not any(reason.startswith("mesh.auto") for reason in start["reasons"])
    assert "Predicted and measured" in (tmp_path / "run" / "report.html").read_text()
    text = run(*words, "data.batch_size=auto", "--run", tmp_path / "other")
    assert "the run is not predicted: data.batch_size=auto is found as the run begins" in text
    assert "prediction" not in record(tmp_path / "other", "start")[-1]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["data.batch_size=auto"], "set data.batch_size to a number"),
        (["recompute={}"], "mesh.auto=true chooses recompute and stream too, and the recipe sets recompute"),
        (["stream.tiles=[2,2]"], "and the recipe sets stream; leave that out"),
    ],
)
def test_mesh_auto_refuses_what_it_would_choose_itself(settings, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        planned_run(read_config(DIGITS, [*FAST, "mesh.auto=true", *settings]), tmp_path, ranks=1, say=print)


def test_axes_beside_mesh_auto_are_refused():
    with pytest.raises(ValueError, match=r"auto=true chooses the axes, and shard=2, space=\[2, 1\] is set too"):
        read_config(DIGITS, ["mesh.auto=true", "mesh.shard=2", "mesh.space=[2,1]"])


def test_a_model_that_cannot_be_emulated_is_refused_in_words(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise CannotEmulate("the forward asks for the value of a pixel")

    monkeypatch.setattr(automatic, "search", refuse)
    with pytest.raises(NotImplementedError, match="needs numbers: the forward asks .* set the axes of mesh yourself"):
        planned_run(read_config(DIGITS, [*FAST, "mesh.auto=true"]), tmp_path, ranks=1, say=print)


def test_machines_like_this_one():
    assert cluster_here(2).ranks == 2 and cluster_here(4, nodes=2).nodes == 2
