"""A few hundred malformed inputs, each of which ends in a clear error or is read right, and changes no file."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from .mutation import BYTES, damaged_bytes, damaged_json
from .trial import Subject, outcome_of

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_300_malformed_inputs_end_in_a_clear_error_or_a_right_result():
    command = [sys.executable, "-m", "tests.malformed", "--seed", "1000000", "--count", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-3000:]}"
    assert "300 malformed inputs in " in done.stdout


def test_what_is_wrong_is_found(tmp_path):
    """A reader that fails without words, hangs on nothing, or writes is told from one that is right."""

    def outcome(read) -> str:
        return outcome_of(Subject("x", tmp_path, {"a": damaged_bytes}, read), 3)

    (tmp_path / "a").write_bytes(b"some bytes that can be damaged")
    assert outcome(lambda folder: None) == "read"
    assert outcome(lambda folder: {}["no"]).startswith("wrong: KeyError")
    assert outcome(lambda folder: int("x")).startswith("wrong: an error of a library: ValueError")
    assert outcome(lambda folder: (folder / "b").write_text("b")).startswith("wrong: it changed here/b (read)")
    assert (tmp_path / "a").read_bytes() == b"some bytes that can be damaged"


def test_damages_are_of_every_kind_and_the_same_for_a_seed():
    content = bytes(range(256)) * 4
    found = {damaged_bytes(content, random.Random(seed)) for seed in range(200)}
    assert len(found) > 150 and b"" in found and len(BYTES) == 9
    tree = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    assert damaged_json(tree, random.Random(1)) == damaged_json(tree, random.Random(1)) != tree
