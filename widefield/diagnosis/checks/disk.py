"""Has the run folder's disk room, and how fast does it write?"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State
from widefield.diagnosis.place import Surroundings
from widefield.quantity import bytes_text

ORDER, TITLE, MESSAGES = 60, "disk", False
WRITTEN = 16 * 2**20
LEAST, FEW = 2**30, 10 * 2**30
SLOW = 20e6
"""Bytes per second below which a checkpoint is felt."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    """Rank 0 writes a file of 16 MiB beside where the run folder is or will be, and deletes it."""
    folder = surroundings.existing_folder()
    facts: dict[str, Any] = {"folder": str(folder), "free": shutil.disk_usage(folder).free, "rate": 0.0, "problem": ""}
    if surroundings.world.rank != 0:
        return facts
    began = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".widefield_doctor_") as file:
            file.write(os.urandom(2**20) * (WRITTEN // 2**20))
            file.flush()
            os.fsync(file.fileno())
            facts["rate"] = WRITTEN / (time.perf_counter() - began)
    except OSError as error:
        facts["problem"] = os.strerror(error.errno) if error.errno else str(error)
    with contextlib.suppress(OSError):
        inodes = os.statvfs(folder)
        facts["files"] = inodes.f_favail if inodes.f_files else -1
    return facts


def judge(facts: Sequence[Facts]) -> Finding:
    first = facts[0]
    if first["problem"]:
        return Finding(
            "bad", f"{first['folder']} cannot be written on {first['host']}: {first['problem']}", "name another with --run"
        )
    figure = f"{bytes_text(first['free'])} free at {first['folder']}, {first['rate'] / 1e6:,.0f} MB/s"
    if 0 <= first.get("files", -1) < 1000:
        return Finding(
            "bad", f"{figure}; {first['files']} more files fit (df -i)", "delete what is not needed, or name another with --run"
        )
    if first["free"] < LEAST:
        return Finding("bad", figure, "a checkpoint may not fit; free some space, or name another folder with --run")
    if first["free"] < FEW:
        return Finding("warn", figure, "room for few checkpoints: checkpoint.keep_last says how many are kept")
    if first["rate"] < SLOW:
        return Finding(
            "warn", figure, "checkpoints are saved in the background (checkpoint.background), but the next waits for the last"
        )
    return Finding("ok", figure)


_ONE = {"rank": 0, "host": "n1", "folder": "/runs", "free": 2**40, "rate": 4e8, "problem": "", "files": 10**6}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "1024 GiB free at /runs, 400 MB/s"),
    ([{**_ONE, "problem": "Read-only file system"}], "bad", "/runs cannot be written on n1: Read-only file system"),
    ([{**_ONE, "free": 2**29}], "bad", "512 MiB free"),
    ([{**_ONE, "free": 2**32}], "warn", "4.0 GiB free"),
    ([{**_ONE, "rate": 2e6}], "warn", "2 MB/s"),
    ([{**_ONE, "files": 12}], "bad", "12 more files fit"),
]
