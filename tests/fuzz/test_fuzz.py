"""A short run of the fuzzer with fixed seeds, and all that it has found before.  CONTRIBUTING.md says how to run more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from marks import few

ROOT = Path(__file__).parents[2]
PART = 20
"""Programs that are drawn in one go."""
FINDINGS = ["--programs 30", "--seed 30 --programs 30", "--seed 60"]
"""Parts of the findings, in their order; the last has what is left."""


def told_by(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    return done.returncode, done.stdout + done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("seed", few(range(0, 100, PART), 0, is_sweep=True))
def test_random_programs_give_one_devices_numbers(seed):
    status, text = told_by("--seed", str(seed), "--programs", str(PART), "--gloo", "0.1", "--minutes", "8")
    assert status == 0, text
    counts = re.search(r"(\d+) programs \((\d+) on gloo\): (\d+) exact, (\d+) refused in words, no finding", text)
    programs, on_gloo, exact, refused = map(int, counts.groups())
    assert programs >= PART - 1 and on_gloo >= 1 and exact >= 0.8 * programs and exact + refused == programs, text


@pytest.mark.long
@pytest.mark.parametrize("part", few(FINDINGS, FINDINGS[0], is_sweep=True))
def test_what_was_found_before_stays_mended(part):
    status, text = told_by("--findings", *part.split())
    assert status == 0 and " 0 refused in words, no finding" in text, text
