"""Is what runs on GPUs tested there, does `make test-gpu` say what ran, and does the benchmark for GPUs run, on the CPU?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS, PROGRAM = ROOT / "tests", ROOT / "benchmarks" / "gpu.py"
ROOMS = ("comm", "ops", "parallel", "pipelining", "story", "streaming", "tensor_parallel", "tiled")
"""Folders of tests whose subject computes or sends on the device."""
WITHOUT_GPUS = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def benchmark(*words: str, seconds: float) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, env=WITHOUT_GPUS, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_that_computes_is_tested_on_a_gpu(room):
    files = sorted((TESTS / room).rglob("test_*.py"))
    assert [file.name for file in files if re.search(r"^@on_gpu_(too|alone)$", file.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.long
@pytest.mark.alone
def test_without_a_gpu_the_run_says_how_many_tests_did_not_run():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=WITHOUT_GPUS, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ran = re.search(r"^GPU tests: 0 of (\d+) ran$", done.stdout, re.MULTILINE)
    assert ran and int(ran[1]) > 100, done.stdout[-2000:]


# ---------------------------------------------------------------------------------------------- the benchmark


@pytest.mark.long
def test_without_a_gpu_the_benchmark_says_so_and_writes_nothing(tmp_path):
    done = benchmark("--output", str(tmp_path / "gpu.json"), seconds=120)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["No GPU is here, so nothing was measured; --device cpu --small tries the program on the CPU."],
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_part_that_is_not_there_is_refused():
    done = benchmark("--only", "step,peer", seconds=120)
    assert done.returncode == 2 and "there is no part 'peer'; there are step, image, halo, peers" in done.stderr


ROWS = {
    "step": 3,  # images/s of both, and their ratio
    "image": 6,  # two largest sides; time per pixel of both, their ratio, and that of tiles at their largest
    "halo": 3,
    "peers": 4,  # of two strategies, by hand and the ratio
}
"""By part of the benchmark, how many rows it gives."""


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_the_benchmark_runs_small_on_the_cpu_and_its_results_have_their_conditions(tmp_path):
    file = tmp_path / "gpu.json"
    done = benchmark("--device", "cpu", "--small", "--output", str(file), seconds=1450)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    about = result["conditions"]
    assert about["device"] == "cpu" and about["small"] is True and about["gpus"] == []
    assert all(about[name] for name in ("torch", "python", "commit", "processor", "cores", "date"))
    assert {name: len(part["rows"]) for name, part in result["parts"].items()} == ROWS
    for part in result["parts"].values():
        assert part["question"] and part["seconds"] > 0 and "failed" not in part and "not run" not in part
        for row in part["rows"]:
            assert row["name"] in done.stdout and row["unit"] and row["value"] > 0
            assert row["n"] == 1 or row["lowest"] <= row["value"] <= row["highest"]
    sides = [row["value"] for row in result["parts"]["image"]["rows"] if row["unit"] == "px"]
    assert sides[1] > sides[0], "an image that is run tile after tile may be larger"


# ---------------------------------------------------------------------------------------------- its parts


@pytest.fixture
def gpu_image(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import gpu_image

    return gpu_image


@pytest.mark.parametrize("limit", [64, 100, 640, 1000, 4096, 5000])
def test_the_search_finds_the_largest_side_that_fits(gpu_image, limit):
    """Looked for up and down from 64; sides are multiples of 64 and the step a sixteenth at most."""
    tried: list[int] = []
    found = gpu_image.largest(lambda side: tried.append(side) or side <= limit, start=64, most=8192, halt=lambda side: None)
    assert found.side <= limit < found.over
    assert found.over - found.side <= max(64, found.side // 16) and len(tried) < 16
    assert found.note == f"{found.over:,} px did not fit"


def test_the_search_says_what_ended_it(gpu_image):
    def late(side):
        return "late" if side > 256 else None

    assert gpu_image.largest(lambda side: True, start=64, most=8192, halt=late).note == "not tried further: late"
    most = gpu_image.largest(lambda side: True, start=64, most=128, halt=lambda side: None)
    assert (most.side, most.over, most.why) == (128, None, "128 px is the most that is tried")
    assert gpu_image.largest(lambda side: False, start=64, most=128, halt=lambda side: None) is None
