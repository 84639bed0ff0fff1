"""A short run of the fuzzer with fixed seeds, and all that it has found before.  CONTRIBUTING.md says how to run more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def told_by(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    return done.returncode, done.stdout + done.stderr[-3000:]


def test_random_programs_give_one_devices_numbers():
    status, text = told_by("--seed", "0", "--programs", "100", "--gloo", "0.1", "--minutes", "8")
    assert status == 0, text
    counts = re.search(r"(\d+) programs \((\d+) on gloo\): (\d+) exact, (\d+) refused in words, no finding", text)
    programs, on_gloo, exact, refused = map(int, counts.groups())
    assert programs >= 93 and on_gloo >= 2 and exact >= 0.8 * programs and exact + refused == programs, text


def test_what_was_found_before_stays_mended():
    status, text = told_by("--findings")
    assert status == 0 and " 0 refused in words, no finding" in text, text
