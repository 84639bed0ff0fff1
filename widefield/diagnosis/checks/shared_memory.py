"""Is /dev/shm large enough for loader workers and for NCCL?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host
from widefield.diagnosis.place import Surroundings
from widefield.quantity import bytes_text

ORDER, TITLE, MESSAGES = 50, "shared memory", False
DOCKERS = 64 * 2**20
"""What a container has that asked for no more."""
PER_RANK = 2**30


def look(surroundings: Surroundings) -> dict[str, Any]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return {"total": 0, "free": 0, "workers": surroundings.workers, "ranks": surroundings.world.local_size}
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return {"total": total, "free": free, "workers": surroundings.workers, "ranks": surroundings.world.local_size}


def judge(facts: Sequence[Facts]) -> Finding:
    host, least = min(by_host(facts).items(), key=lambda pair: pair[1]["free"])
    if not least["total"]:
        return Finding("warn", f"{host} has no /dev/shm", "loader workers need it on Linux; data.workers=0 reads in the rank")
    figure = f"{bytes_text(least['free'])} of {bytes_text(least['total'])} free on {host}"
    uses = least["workers"] > 0 or least["ranks"] > 1
    if uses and least["total"] <= DOCKERS:
        return Finding("bad", figure, REMEDY)
    if uses and least["free"] < min(PER_RANK * least["ranks"], 16 * PER_RANK):
        return Finding("warn", f"{figure}, for {least['ranks']} ranks with {least['workers']} workers each", REMEDY)
    return Finding("ok", figure)


REMEDY = "docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm"

_ONE = {"rank": 0, "host": "n1", "total": 64 * 2**30, "free": 60 * 2**30, "workers": 4, "ranks": 8}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "60 GiB of 64 GiB free on n1"),
    ([_ONE, {**_ONE, "rank": 8, "host": "n2", "total": 2**26, "free": 2**26}], "bad", "64 MiB of 64 MiB free on n2"),
    ([{**_ONE, "total": 2**26, "free": 2**26, "workers": 0, "ranks": 1}], "ok", "64 MiB"),
    ([{**_ONE, "free": 2**30}], "warn", "1.0 GiB of 64 GiB free on n1, for 8 ranks with 4 workers each"),
    ([{**_ONE, "total": 0, "free": 0}], "warn", "n1 has no /dev/shm"),
]
