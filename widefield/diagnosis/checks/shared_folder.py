"""Is the run folder the same on all hosts?"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 62, "shared folder", True
SECONDS = 10.0
"""Until a file that rank 0 wrote has to be seen by the others: network filesystems remember for a while what is not there."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    """Rank 0 writes a file, the others look for it."""
    mesh, folder = surroundings.mesh, surroundings.existing_folder()
    if mesh is None or mesh.size == 1:
        return {"sees": True, "folder": str(folder)}
    name, problem = f".widefield_doctor_{secrets.token_hex(8)}", ""
    if mesh.is_main:
        try:
            (folder / name).write_text(name, encoding="utf-8")
        except OSError as error:
            problem = str(error)
    name, where, problem = mesh.gather_objects((name, str(folder), problem))[0]
    sees = False if problem else _appears(folder / name)
    mesh.barrier()
    if mesh.is_main:
        (folder / name).unlink(missing_ok=True)
    return {"sees": sees, "folder": str(folder), "of_rank_0": where, "problem": problem}


def _appears(path: Path) -> bool:
    until = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def judge(facts: Sequence[Facts]) -> Finding:
    blind = [one for one in facts if not one["sees"]]
    first = facts[0]
    if blind:
        if first.get("problem"):
            return Finding("bad", f"rank 0 cannot write in {first['folder']}: {first['problem']}", "name another with --run")
        figure = f"{who(blind)} does not see in {blind[0]['folder']} what rank 0 writes in {first['folder']}"
        return Finding("bad", figure, "name a folder on a filesystem that all hosts share, by its absolute path, with --run")
    hosts = len(by_host(facts))
    return Finding("ok", f"{first['folder']} is the same on {hosts} hosts" if hosts > 1 else "one host")


_ONE = {"rank": 0, "host": "n1", "folder": "/runs", "sees": True, "of_rank_0": "/runs", "problem": ""}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, {**_ONE, "rank": 1, "host": "n2"}], "ok", "/runs is the same on 2 hosts"),
    ([_ONE], "ok", "one host"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "sees": False}], "bad", "n2 does not see in /runs what rank 0 writes"),
    ([{**_ONE, "sees": False, "problem": "no room"}], "bad", "rank 0 cannot write in /runs: no room"),
]
