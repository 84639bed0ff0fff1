"""Did all ranks find each other?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 12, "meeting", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    return {"size": surroundings.world.size, "problem": surroundings.problem, "seconds": surroundings.met_seconds}


def judge(facts: Sequence[Facts]) -> Finding:
    problems = [one for one in facts if one["problem"]]
    if problems:
        first = problems[0]
        return Finding("bad", f"rank {first['rank']} on {first['host']}: {first['problem']}", REMEDY)
    if facts[0]["size"] == 1:
        return Finding("not here", "one rank has nobody to meet")
    return Finding("ok", f"{facts[0]['size']} ranks met in {max(one['seconds'] for one in facts):.1f} s")


REMEDY = (
    "what is told below is of this host alone; see host names, interfaces and ports there, and that all ranks were started. "
    "widefield doctor LOGFILE explains what the launcher and NCCL have printed"
)

CASES: list[tuple[list[Facts], State, str]] = [
    ([{"rank": 0, "host": "n1", "size": 2, "problem": "", "seconds": 0.21}] * 2, "ok", "2 ranks met in 0.2 s"),
    ([{"rank": 0, "host": "n1", "size": 1, "problem": "", "seconds": 0.0}], "not here", "one rank"),
    ([{"rank": 1, "host": "n2", "size": 2, "problem": "did not meet", "seconds": 0.0}], "bad", "rank 1 on n2: did not meet"),
]
