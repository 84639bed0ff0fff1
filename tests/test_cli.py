"""The command: help that teaches, errors in words with status 2, and nothing started before they are said."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import DIGITS, run

from widefield.cli import main, parse
from widefield.config import parse_config
from widefield.naming import load, names_in

VERBS = (
    "init",
    "data",
    "inspect",
    "train",
    "launch",
    "evaluate",
    "predict",
    "sample",
    "export",
    "verify",
    "plan",
    "doctor",
    "bench",
    "list",
    "report",
    "view",
    "replay",
)
CASES = [
    pytest.param(name, words, expected, id=f"{name}: {' '.join(words)}")
    for name in names_in("widefield.cli")
    for words, expected in load("widefield.cli", name).CASES
]


def said(capsys, *arguments: str, status: int = 0) -> str:
    try:
        assert main(list(arguments)) == status
    except SystemExit as ended:
        assert ended.code == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_help_shows_every_verb_with_an_example(capsys):
    text = said(capsys, "--help")
    assert all(verb in text for verb in VERBS)
    assert "widefield train digits" in text
    for verb in VERBS:
        assert f"widefield {verb} " in said(capsys, verb, "--help")


def test_the_help_lists_verbs_in_their_order_with_their_summaries(capsys):
    text = said(capsys, "--help")
    verbs = sorted(names_in("widefield.cli"), key=lambda name: load("widefield.cli", name).ORDER)
    assert tuple(verbs) == VERBS
    assert re.findall(r"^    (\w+) +(\S.*)$", text, re.MULTILINE) == [
        (verb, load("widefield.cli", verb).SUMMARY) for verb in verbs
    ]


@pytest.mark.parametrize(("name", "words", "expected"), CASES)
def test_arguments_mean_the_options_of_a_verbs_cases_or_are_refused(name, words, expected, capsys):
    if isinstance(expected, str):
        with pytest.raises(SystemExit) as ended:
            parse([name, *words])
        assert ended.value.code == 2 and expected in capsys.readouterr().err
    else:
        options = parse([name, *words])
        assert options.verb is load("widefield.cli", name) and not options.is_rank
        assert {key: getattr(options, key) for key in expected} == expected and expected


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["train", "--schema"], ["train", DIGITS, "--print-config"], ["train", "none.yaml"]],
)
def test_help_and_what_needs_no_device_load_no_torch(words):
    program = (
        "import atexit, sys; from widefield.cli import main;"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
        f"sys.exit(main({words!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == (2 if "none.yaml" in words else 0), ended.stderr
    assert ended.stderr.splitlines()[-1] == "False"


def test_the_printed_config_is_whole_and_reads_back(capsys):
    text = said(capsys, "train", DIGITS, "--print-config", "optimizer.lr=0.2", "seed=3", "--run", "x", "schedule.length=5ep")
    config = parse_config(text)
    assert (config.optimizer.lr, config.seed, str(config.schedule.length)) == (0.2, 3, "5ep")
    assert "bucket_mib" in text


def test_the_schema_accepts_the_recipe_and_knows_its_keys(capsys):
    schema = json.loads(said(capsys, "train", "--schema"))
    recipe = yaml.safe_load(Path(DIGITS).read_text())
    assert set(recipe) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "name a recipe or a folder of images"),
        (["train", "recipes/digit.yaml"], "no recipe at recipes/digit.yaml"),
        (["train", DIGITS.replace("digits.yaml", "digit.yaml")], "did you mean 'digits.yaml'"),
        (["train", DIGITS, "optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'"),
        (["train", DIGITS, "optimizer.lr=fast"], "'optimizer.lr' is 'fast' (str)"),
        (["train", DIGITS, "optimizer"], "not an override: 'optimizer'; write KEY=VALUE"),
        (["evaluate", "nowhere"], "nowhere is no run folder"),
        (["predict", "nowhere", "a.png"], "nowhere is no run folder"),
        (["export", "nowhere"], "nowhere is no run folder"),
        (["report", "nowhere"], "nowhere is no run folder"),
        (["train", DIGITS, "mesh.data_strategy=data_parallel", "mesh.replicate=2"], "drives all GPUs from one process"),
    ],
)
def test_what_is_wrong_is_said_in_words_with_status_2(arguments, words, capsys):
    text = said(capsys, *arguments, status=2)
    assert words in text
    assert any(line.startswith("widefield: ") for line in text.splitlines()) and "Traceback" not in text


@pytest.mark.parametrize("override", ["optimizer.lr=1", "schedule.length=5ep", "ema={decay: 0.9}", "log.every=1"])
def test_what_an_evaluation_has_no_use_for_is_refused(override, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(Path(DIGITS).read_text())
    text = said(capsys, "evaluate", str(tmp_path), override, status=2)
    assert f"{override} changes nothing in an evaluation, which does not train; leave it out" in text


def test_a_mesh_that_cannot_run_starts_no_rank(capsys):
    begun, refused = said(capsys, "train", DIGITS, "mesh.shard=65", "mesh.replicate=1", status=2).splitlines()
    assert begun.endswith("loading torch, the data and the model") and refused.startswith("widefield: ")


@pytest.mark.parametrize("words", [["--rum", "x"], ["-x"]])
def test_unknown_options_are_refused(words, capsys):
    assert "not understood" in said(capsys, "train", DIGITS, *words, status=2)


# ---------------------------------------------------------------------------------------------- verify


SMALL = ("verify", "resnet", "--image", "3x17x14", "widths=[4]", "blocks=1", "--batch", "1")


def test_verify_proves_tiles_in_time_in_this_process(capsys, monkeypatch):
    monkeypatch.setattr("multiprocessing.context.ForkContext.Process", None)
    lines = said(capsys, *SMALL, "--stream", "2x3").splitlines()
    assert lines[0].split()[:2] == ["1", "output"] and lines[1].split()[1] == "gradients" and lines[-1] == "exact"


def test_verify_proves_both_kinds_of_tiles_together(capsys):
    assert said(capsys, *SMALL, "--space", "2", "--stream", "2x2", "--eval").splitlines()[-1] == "exact"


def test_verify_proves_a_plan_that_a_file_has(capsys, tmp_path):
    (tmp_path / "plan.yaml").write_text("channel: 2\n")
    lines = said(capsys, *SMALL, "--plan", str(tmp_path / "plan.yaml")).splitlines()
    assert lines[0].startswith("  channels: 2 ranks share") and any(" losses " in line for line in lines)
    assert any(line.startswith("left whole: 3 operations, 3 KiB in all") for line in lines) and lines[-1] == "exact"


def test_a_plan_that_is_not_there_or_has_a_wrong_key_is_refused(capsys, tmp_path):
    assert "no plan at nowhere.yaml; write one as" in said(capsys, *SMALL, "--plan", "nowhere.yaml", status=2)
    (tmp_path / "plan.yaml").write_text("chanel: 2\n")
    assert "did you mean 'channel'?" in said(capsys, *SMALL, "--plan", str(tmp_path / "plan.yaml"), status=2)


@pytest.mark.parametrize("option", ["--space", "--stream"])
def test_more_tiles_than_an_image_has_dims_are_refused(option, capsys):
    text = said(capsys, *SMALL, option, "2x2x2", status=2)
    assert f"{option} has 3 sizes and an image of [3, 17, 14] has 2 dims to cut" in text


@pytest.mark.parametrize("option", ["--space", "--stream"])
def test_what_is_no_size_says_how_to_write_one(option, capsys):
    assert "'2y2' is no size; write whole numbers with x between them" in said(capsys, *SMALL, option, "2y2", status=2)


def as_rank_0_of_2(monkeypatch, address: str) -> None:
    """The environment of a rank; a rank leaves by os._exit, which here only raises."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address}
    for name, value in (place | {"MASTER_PORT": "29511"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)


@pytest.mark.parametrize("option", ["--batch", "--classes"])
@pytest.mark.parametrize("text", ["0", "-1", "two", "²"])
def test_no_images_and_no_classes_prove_nothing(option, text, capsys):
    assert f"{text!r} is no count; write a whole number, 1 or more" in said(capsys, *SMALL, f"{option}={text}", status=2)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train", DIGITS], "--run"), (["evaluate", "x"], "--weights"), (["export", "x"], "--output"),
        (["bench", DIGITS], "--out"), (["bench", DIGITS], "--plans"), (["verify", "resnet", "--image", "1x8x8"], "--plan"),
    ],
)  # fmt: skip
def test_an_option_with_nothing_behind_it_is_not_left_out_in_silence(words, option, capsys):
    assert "it is empty; give it a value, or leave the option out" in said(capsys, *words, option, "", status=2)


def test_a_rank_that_is_no_number_is_said_in_words(capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "first")
    assert "RANK" in said(capsys, "train", DIGITS, "--run", "x", status=2)


def test_a_recipe_that_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"model: \xff\xfe")
    told = said(capsys, "train", str(tmp_path / "recipe.yaml"), status=2)
    assert "recipe.yaml is no recipe, which is" in told and "invalid start byte" in told


def test_ranks_of_a_launcher_without_a_run_folder_are_told_to_name_one(capsys, monkeypatch):
    as_rank_0_of_2(monkeypatch, "localhost")
    assert "add --run-dir DIR" in said(capsys, "train", DIGITS, status=2)


def test_a_meeting_place_that_cannot_be_resolved_is_an_error_not_a_world_of_one(capsys, monkeypatch, tmp_path):
    as_rank_0_of_2(monkeypatch, "no.such.host.invalid")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    told = said(capsys, "train", DIGITS, "--run", str(tmp_path), "mesh.replicate=2", status=2)
    assert "cannot resolve the meeting place no.such.host.invalid:29511" in told
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.mark.long
def test_torchrun_starts_the_same_command(tmp_path):
    """Under torchrun the command sees its place and starts nothing itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "widefield"]
    arguments = ["train", DIGITS, "--run-dir", str(tmp_path / "run"), "schedule.length=1ep", "schedule.warmup=0ep"]
    ended = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "on replicate=2 (cpu)" in ended.stdout
    assert ended.stdout.count("trained to the end") == 1


@pytest.mark.long
@pytest.mark.sweep
def test_runs_get_fresh_numbered_folders(tmp_path):
    for _ in range(2):
        run("train", DIGITS, "schedule.length=1step", "schedule.warmup=0step", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0001", "0002"]
    assert "top-1 on 360/360 images" in run("evaluate", tmp_path / "runs" / "0002")


# ---------------------------------------------------------------------------------------------- verify


@pytest.mark.long
def test_verify_says_that_a_model_is_exact():
    lines = run("verify", "timm/resnet18", "--image", "3x97x101", "--space", "2x1").splitlines()
    assert lines[-1] == "exact"
    assert [line.split()[1] for line in lines[:-2]] == ["output", "gradients", "buffers"]
    assert " weights of zeros had random values here" in lines[-2]  # residual branches of timm's begin at zero


@pytest.mark.long
def test_verify_says_which_layers_differ_and_ends_with_status_1(tmp_path):
    (tmp_path / "cheats.py").write_text(CHEATS)
    told = run("verify", "cheats:build", "--image", "3x20x12", "--space", "1x2", status=1, cwd=tmp_path)
    assert "differs: layer head (Conv2d) 0" in told and "stem" not in told
    assert told.rstrip().endswith("NOT EXACT")


@pytest.mark.long
def test_verify_says_why_a_model_is_refused_and_ends_with_status_2(tmp_path):
    (tmp_path / "refused.py").write_text(REFUSED)
    told = run("verify", "refused:build", "--image", "3x20x12", status=2, cwd=tmp_path)
    assert told.startswith("refused: ") and "svd" in told and "Traceback" not in told


@pytest.mark.long
@pytest.mark.sweep
def test_verify_hands_options_to_the_model_and_can_leave_the_backward_out():
    told = run("verify", "unet", "--image", "1x21x18", "--space", "2", "--batch", "1", "--eval", "widths=[4,6]", "norm=group")
    assert told.splitlines()[-1] == "exact" and "gradient" not in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image", "3x97xwide"], "'3x97xwide' is no size; write whole numbers with x between them, as 3x97x101"),
        (["--image", "3x0x9"], "'3x0x9' is no size"),
        (["--image", "3x97x101", "--space", "two"], "'two' is no size"),
        (["--image", "3x97x101", "--space", "2x1x1"], "--space has 3 sizes and an image of [3, 97, 101] has 2 dims to cut"),
        (["--space", "2"], "--image"),
        (["--image", "3x97x101", "widths=[4,8]", "norm=layer"], "model.options.norm is 'layer'"),
    ],
)
def test_verify_refuses_what_it_cannot_read_and_starts_no_rank(arguments, words, capsys):
    text = said(capsys, "verify", "unet", *arguments, status=2)
    assert words in text and "Traceback" not in text


CHEATS = """
from torch import nn

class Cheats(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, image):
        x = self.stem(image)
        return self.head(x - getattr(x, "local", x).detach().mean())

def build(in_channels, num_classes):
    return Cheats()
"""
REFUSED = """
import torch
from torch import nn

class Refused(nn.Module):
    def forward(self, image):
        return torch.linalg.svdvals(image)

def build(in_channels, num_classes):
    return Refused()
"""
