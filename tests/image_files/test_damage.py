"""Is a damaged file of any format refused by its name, or read, without a crash, a hang, or missing pixels in silence?"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import damaged_reads
import pytest
from image_examples import CASES, pixels_of

from widefield.naming import load

PROGRAM = Path(damaged_reads.__file__)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """A folder for each example of each format."""
    place = tmp_path_factory.mktemp("examples")
    for number, (name, file, shape, dtype) in enumerate(CASES):
        folder = place / f"{number:03}-{name}"
        folder.mkdir()
        load("widefield.image_files.formats", name).write_example(folder / file, pixels_of(shape, dtype))
        (folder / "name.txt").write_text(file)
    return place


def read_all(place: Path, seed: int = 0, program: Path = PROGRAM) -> dict[str, str]:
    """What became of each damage, by what it was.  A process that dies is started again with the next one."""
    found: dict[str, str] = {}
    first, total = 0, len(CASES) * len(damaged_reads.KINDS)
    while first < total:
        command = [sys.executable, str(program), str(place), str(first), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        began, ended = {}, {}
        for line in done.stdout.splitlines():
            word, number, rest = line.split(" ", 2)
            (began if word == "begin" else ended)[int(number)] = rest
        found |= {f"{number}: {what}": ended.get(number, f"died with {done.returncode}") for number, what in began.items()}
        assert began and (done.returncode or len(ended) == len(began)), done.stderr
        first = max(began) + 1
    return found


@pytest.mark.long
def test_500_damaged_files_are_refused_by_name_or_read(examples):
    found = read_all(examples)
    counts = Counter(outcome if outcome in ("refused", "read", "as before") else "wrong" for outcome in found.values())
    print(f"{len(found)} damaged files: {dict(counts)}")
    assert len(found) == len(CASES) * len(damaged_reads.KINDS) >= 500
    wrong = [f"{what}: {outcome}" for what, outcome in found.items() if outcome not in ("refused", "read", "as before")]
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > len(found) / 3  # so that it is known that the damage does reach the readers


DIES = """
import os, sys
first = int(sys.argv[2])
for at in range(first, max(first + 1, 666)):
    print("begin", at, "this file is damaged", flush=True)
    if at in (3, 665):
        os.abort()
    print("end", at, "refused", flush=True)
"""


def test_a_reader_that_dies_is_found_and_the_others_are_tried(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    found = read_all(tmp_path, program=tmp_path / "dies.py")
    assert {what for what, outcome in found.items() if outcome != "refused"} == {
        "3: this file is damaged", "665: this file is damaged",
    }  # fmt: skip
    assert len(found) >= 666 and found["3: this file is damaged"] == "died with -6"
