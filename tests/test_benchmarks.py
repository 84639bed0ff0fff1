"""Do the benchmarks run?  In the smallest form, so that a change that breaks one is found before its figures are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import few

pytestmark = pytest.mark.long
FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "data_parallel": ["--pairs", "1", "--steps", "1", "--batch", "2", "--side", "32"],
    "strategies": ["--pairs", "1", "--steps", "1", "--batch", "2", "--side", "32", "--only", "DDP"],
    "guards": ["--pairs", "1", "--steps", "1", "--batch", "2", "--side", "32"],
    "pipeline": ["--pairs", "1", "--steps", "1", "--only", "gpipe"],
}


@pytest.mark.parametrize("name", few(SMALL, "data_parallel", is_sweep=True))
def test_a_benchmark_runs_and_prints_its_ratios(name, tmp_path):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SMALL[name]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert "ratio, median of pairs" in json.dumps(told)


@pytest.mark.sweep
def test_the_planners_benchmark_finds_its_gates_kept(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "planner.py"),
        "memory",
        "messages",
        "flops",
        "--nets",
        "resnet",
        "--plans",
        "one;rows",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["gates that do not hold"] == told["messages that differ"] == told["FLOPs that differ"] == []
    assert [row["rank"] for row in told["rows"]] == [0, 0, 1]
