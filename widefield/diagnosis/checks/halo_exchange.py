"""How fast do pixels travel between the ranks that share an image, beside what the hardware should give?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State
from widefield.diagnosis.measured import judged, timed
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 72, "halo exchange", True


def look(surroundings: Surroundings) -> dict[str, Any]:
    return timed(surroundings, "halo")


def judge(facts: Sequence[Facts]) -> Finding:
    return judged(facts, "tiles (mesh.space) send their borders so, in every layer")


_ONE = {
    "rank": 0, "host": "n1", "bytes": [4096, 2**26], "seconds": [2e-5, 4e-4], "expected": [1e-5, 3.8e-4], "link": "NVLink 4",
    "on_cpu": False,
}  # fmt: skip

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "64 MiB in 0.40 ms (167.77 GB/s), 95 % of what NVLink 4 should give; a small one in 20 us"),
    ([_ONE, {**_ONE, "rank": 1, "seconds": [2e-5, 1e-3]}], "warn", "38 %"),
    ([_ONE, {**_ONE, "rank": 1, "seconds": [2e-5, 1e-2]}], "bad", "4 %"),
    ([{**_ONE, "seconds": [2e-5, 1e-2], "on_cpu": True}], "warn", "other programs take the cores"),
    ([{"rank": 0, "host": "n1", "seconds": []}], "not here", "one rank sends no messages"),
]
