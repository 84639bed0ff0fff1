"""Has each rank enough of the host's memory, within what the job or the container may use?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host
from widefield.diagnosis.place import Surroundings
from widefield.quantity import bytes_text

ORDER, TITLE, MESSAGES = 54, "host memory", False
PER_RANK, PER_WORKER = 2**30, 2**29
"""A process with torch and a small model; a worker that reads images."""
VERSION_2, VERSION_1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Files of a control group: its limit, and what is used of it."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    available = _available()
    limit = job_limit()
    free = available if limit is None else min(available, limit)
    ranks = surroundings.world.local_size
    return {
        "free": free,
        "is_limited": limit is not None and limit < available,
        "ranks": ranks,
        "workers": surroundings.workers,
    }


def _available() -> int:
    try:
        rows = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def job_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What this process's control groups leave, in bytes; None: no limit is set, or there are no groups.

    root, own: where the system's groups, and the names of this process's, are.
    """
    try:
        name = own.read_text(encoding="utf-8").splitlines()[-1].rpartition(":")[2].lstrip("/")
    except (OSError, IndexError):
        return None
    left = []
    for base, limit, used in ((root, *VERSION_2), (root / "memory", *VERSION_1)):
        for folder in (base / name, *(base / name).parents):
            if not folder.is_relative_to(base):
                break
            texts = [(folder / file).read_text().strip() if (folder / file).is_file() else "" for file in (limit, used)]
            if all(text.isdecimal() for text in texts) and int(texts[0]) < 2**60:
                left.append(max(0, int(texts[0]) - int(texts[1])))
    return min(left, default=None)


def judge(facts: Sequence[Facts]) -> Finding:
    host, least = min(by_host(facts).items(), key=lambda pair: pair[1]["free"] / pair[1]["ranks"])
    each, wanted = least["free"] // least["ranks"], PER_RANK + PER_WORKER * least["workers"]
    of = "the job's limit leaves" if least["is_limited"] else "free are"
    figure = f"{of} {bytes_text(least['free'])} on {host}, {bytes_text(each)} for each of {least['ranks']} ranks"
    if each < PER_RANK // 2:
        return Finding("bad", figure, REMEDY)
    if each < wanted:
        return Finding("warn", f"{figure}, with {least['workers']} workers each", REMEDY)
    return Finding("ok", figure)


REMEDY = "ask for more (#SBATCH --mem=0 for all of a node, docker run --memory), start fewer workers (data.workers) or ranks"

_ONE = {"rank": 0, "host": "n1", "free": 64 * 2**30, "is_limited": False, "ranks": 8, "workers": 4}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "free are 64 GiB on n1, 8.0 GiB for each of 8 ranks"),
    ([{**_ONE, "free": 16 * 2**30, "is_limited": True}], "warn", "the job's limit leaves 16 GiB on n1, 2.0 GiB"),
    ([_ONE, {**_ONE, "rank": 8, "host": "n2", "free": 2 * 2**30}], "bad", "2.0 GiB on n2, 256 MiB for each"),
]
