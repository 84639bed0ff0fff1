"""Do the hosts' clocks agree?  Logs are put in order by them, and files' times compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 46, "clocks", True
ROUNDS = 5
WARN_SECONDS = 1.0


def look(surroundings: Surroundings) -> dict[str, Any]:
    """This clock's lead over rank 0's in the round in which the ranks left the barrier nearest to each other."""
    mesh = surroundings.mesh
    if mesh is None or mesh.size == 1:
        return {"ahead": 0.0, "within": 0.0}
    best: tuple[float, float] = (float("inf"), 0.0)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        mesh.barrier()
        now = time.time()
        times = mesh.gather_objects(now)
        best = min(best, (time.perf_counter() - began, now - times[0]))
    return {"ahead": best[1], "within": best[0]}


def judge(facts: Sequence[Facts]) -> Finding:
    hosts = by_host(facts)
    if len(hosts) < 2:
        return Finding("ok", "one host")
    early, late = (pick(hosts.items(), key=lambda pair: pair[1]["ahead"]) for pick in (min, max))
    apart, error = late[1]["ahead"] - early[1]["ahead"], max(one["within"] for one in facts)
    if apart > WARN_SECONDS + error:
        return Finding("warn", f"{late[0]} is {apart:.1f} s ahead of {early[0]}", "let NTP or chrony set them: timedatectl")
    return Finding("ok", f"within {max(apart, error):.2f} s of each other")


_ONE = {"rank": 0, "host": "n1", "ahead": 0.0, "within": 0.01}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "one host"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "ahead": 0.02}], "ok", "within 0.02 s"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "ahead": -37.0}], "warn", "n1 is 37.0 s ahead of n2"),
]
