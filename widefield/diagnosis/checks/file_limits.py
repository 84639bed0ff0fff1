"""How many files may be open (ulimit -n), and how much memory locked (ulimit -l)?"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host
from widefield.diagnosis.place import Surroundings
from widefield.quantity import bytes_text

ORDER, TITLE, MESSAGES = 52, "file limits", False
PER_WORKER, PER_PEER, BASE = 256, 8, 256
"""Files: of a worker's batches that are under way, of a peer's connections, and of the process itself; rounded up."""
LOCKED = 2**30


def look(surroundings: Surroundings) -> dict[str, Any]:
    files, locked = (resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return {
        "files": _number(files[0]), "files_hard": _number(files[1]), "locked": _number(locked[0]),
        "infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "wanted": BASE + PER_WORKER * surroundings.workers + PER_PEER * surroundings.world.size,
    }  # fmt: skip


def _number(limit: int) -> int:
    """-1 for no limit."""
    return -1 if limit == resource.RLIM_INFINITY else limit


def judge(facts: Sequence[Facts]) -> Finding:
    for host, one in by_host(facts).items():
        if one["infiniband"] and 0 <= one["locked"] < LOCKED:
            return Finding("bad", f"{host}: {bytes_text(one['locked'])} may be locked, and InfiniBand locks more", LOCK)
    limited = {host: one for host, one in by_host(facts).items() if one["files"] >= 0}
    if not limited:
        return Finding("ok", "no limit of open files")
    host, least = min(limited.items(), key=lambda pair: pair[1]["files"] - pair[1]["wanted"])
    if least["files"] < least["wanted"]:
        hard = "no limit" if least["files_hard"] < 0 else f"{least['files_hard']:,}"
        figure = f"{host}: {least['files']:,} files may be open, some {least['wanted']:,} may be wanted (ulimit -Hn: {hard})"
        return Finding("warn" if least["files"] >= 256 else "bad", figure, FILES)
    return Finding("ok", f"{least['files']:,} open files on {host}; some {least['wanted']:,} may be wanted")


FILES = "ulimit -n 65536 before the start; LimitNOFILE of slurmd; docker run --ulimit nofile=65536"
LOCK = "ulimit -l unlimited: /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd, docker run --ulimit memlock=-1"

_ONE = {"rank": 0, "host": "n1", "files": 65536, "files_hard": 65536, "locked": -1, "infiniband": True, "wanted": 1300}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "65,536 open files on n1; some 1,300"),
    ([{**_ONE, "files": -1}], "ok", "no limit"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "files": 1024}], "warn", "n2: 1,024 files may be open, some 1,300"),
    ([{**_ONE, "files": 64}], "bad", "n1: 64 files may be open"),
    ([{**_ONE, "locked": 2**16}], "bad", "64 KiB may be locked"),
    ([{**_ONE, "locked": 2**16, "infiniband": False}], "ok", "65,536"),
]
