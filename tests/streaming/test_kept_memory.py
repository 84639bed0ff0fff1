"""Does memory that tensors give up stay with a process that trains on the CPU, unless its user says otherwise?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from widefield.streaming.storage import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = heap.keep_freed_memory()
for _ in range(3):
    torch.ones(2**24), torch.ones(2**20)
tries = []
for _ in range(8):  # small blocks of other code may come to lie between: then one try takes new memory
    before = faults()
    for _ in range(4):
        torch.ones(2**24), torch.ones(2**20)
    tries.append(faults() - before)
first = min(tries)
heap.SECONDS = 0.0
list(heap.trimmed([1]))  # as a stream without gradients does, in which a tile takes a second
before = faults()
for _ in heap.trimmed(range(4)):
    torch.ones(2**24), torch.ones(2**20)
print(kept, first, faults() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("told", "keeps"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
    ids=["nothing said", "a variable", "a tunable"],
)
def test_freed_memory_is_kept_unless_the_environment_says_how(told, keeps):
    """Blocks of 64 MiB: 16,384 pages of 4 KiB each time they are new.  Of several tries the best one counts."""
    if sys.platform != "linux":
        pytest.skip("glibc's malloc")
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **told}, capture_output=True, text=True, check=True
    )
    kept, faults, faults_in_stream = found.stdout.split()
    assert kept == str(keeps)
    assert int(faults) < 1000 if keeps else int(faults) > 30_000
    assert int(faults_in_stream) > 60_000
