"""The first minute at the command: help, version, errors and Ctrl-C before anything runs; a folder in place of a recipe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from widefield.cli import main
from widefield.launchers import is_launched
from widefield.naming import names_in

ROOT = Path(__file__).parents[1]
ENTRY = "from widefield.__main__ import entry; entry()"


def said(capsys, *arguments: str, status: int = 0) -> str:
    try:
        assert main(list(arguments)) == status
    except SystemExit as ended:
        assert (ended.code or 0) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("verb", ["", *names_in("widefield.cli")])
def test_help_fits_80_columns_and_its_examples_can_be_pasted_into_zsh(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, *filter(None, [verb]), "--help").splitlines()
    assert lines and [line for line in lines if len(line) > 80] == []
    commands = [line for line in lines if re.match(r" +(widefield|torchrun|srun) ", line)]
    bare = [re.sub(r"'[^']*'", "", re.split(r" {3,}(?=\S)", line.strip())[0]) for line in commands]
    assert commands and [line for line in bare if re.search(r"[\[\]{}?;]", line)] == []


def test_an_example_that_is_too_long_is_broken_behind_a_backslash():
    from widefield.cli._help import HelpLayout

    layout = HelpLayout("widefield")._fill_text("A\nB.\n\n  widefield train a.yaml optimizer.lr=0.2   what it does\n", 34, "")
    assert layout.splitlines() == ["A B.", "", "  widefield train a.yaml \\", "      optimizer.lr=0.2", "      what it does"]


def test_the_version_is_printed_without_loading_torch():
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); " + ENTRY
    done = subprocess.run([sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert re.match(r"widefield \S.*, Python 3\.\d+\.\d+, torch \d+\.\d+.*\nFalse\n$", done.stdout), done.stdout + done.stderr


def test_a_file_that_is_no_recipe_is_refused_and_the_folder_is_advised(tmp_path, capsys):
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    told = said(capsys, "train", str(tmp_path / "photo.png"), status=2)
    assert "photo.png is no recipe, which is a YAML file" in told and f"'widefield train {tmp_path.name}/'" in told


def _hear() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("start", [["-m", "widefield"], ["-c", ENTRY]])
def test_ctrl_c_during_imports_is_one_line_and_no_traceback(start, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(30)\n")
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, *start, "train", "digits"]
    process = subprocess.Popen(command, cwd=ROOT, env=place, text=True, stdout=PIPE, stderr=PIPE, preexec_fn=_hear)
    assert process.stdout.readline().startswith("resnet on digits") and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (130, "widefield: ended at once, as it was still loading\n")


def test_both_ways_to_start_find_the_same_modules(tmp_path):
    (tmp_path / "show.py").write_text("import sys\nprint(sys.path)\n")
    code = "import sys; from widefield.__main__ import forget_the_folder as f; f(); print([p for p in sys.path if p])"
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    paths = [
        subprocess.run([sys.executable, *flags, "-c", code], cwd=tmp_path, env=place, capture_output=True, text=True).stdout
        for flags in ([], ["-P"])
    ]
    assert paths[0] == paths[1] and str(tmp_path) not in paths[0] and str(ROOT) in paths[0]


FIRST_LINE = """
import os, sys
class Out:
    encoding = "utf-8"
    def write(self, text):
        os.write(1, f"{text.strip()}|{'torch' in sys.modules}".encode())
        os._exit(0)
sys.stdout = Out()
from widefield.__main__ import entry
entry()
"""


@pytest.mark.parametrize(
    ("recipe", "told"), [("digits", "resnet on digits, for "), ("photos", "looking at the images in photos")]
)
def test_the_first_line_comes_before_torch_is_loaded(tmp_path, recipe, told):
    (tmp_path / "photos").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, "train", recipe], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(told) and done.stdout.endswith("|False"), (done.stdout, done.stderr)


def test_ranks_of_a_launcher_say_nothing_before_they_know_their_place():
    assert is_launched({"RANK": "1"}) and is_launched({"SLURM_PROCID": "0"}) and not is_launched({"MASTER_PORT": "29500"})
