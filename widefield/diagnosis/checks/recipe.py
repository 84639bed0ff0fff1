"""Does the recipe's plan fit these ranks, and is its data there on all hosts?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, who
from widefield.diagnosis.place import Surroundings
from widefield.plans import check, plan_of

ORDER, TITLE, MESSAGES = 14, "recipe", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    config = surroundings.config
    if config is None:
        return {"plan": ""}
    problem = ""
    try:
        plan = str(plan_of(config, surroundings.world.size))
        check(plan_of(config, surroundings.world.size), ranks=surroundings.world.size,
              samples_per_step=config.data.batch_if_known)  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        plan, problem = "none", str(error)
    path = config.data.path
    return {"plan": plan, "problem": problem, "path": path or "", "is_there": path is None or _is_there(path)}


def _is_there(path: str) -> bool:
    """Whether a path, or for a pattern its folder, is on this host."""
    parts = Path(path).parts
    patterns = [number for number, part in enumerate(parts) if any(sign in part for sign in "*?[{")]
    return Path(*parts[: patterns[0]] if patterns else parts).exists()


def judge(facts: Sequence[Facts]) -> Finding:
    first = facts[0]
    if not first["plan"]:
        return Finding("not here", "no recipe was named")
    refused = [one for one in facts if one["problem"]]
    if refused:
        return Finding("bad", refused[0]["problem"], "widefield plan RECIPE --cluster MACHINES says which plan fits")
    blind = [one for one in facts if not one["is_there"]]
    if blind:
        return Finding(
            "bad", f"{who(blind)}: data.path={blind[0]['path']} is not there", "mount or copy the data on every host"
        )
    data = f", data at {first['path']}" if first["path"] else ""
    return Finding("ok", f"{first['plan']}{data}")


_ONE = {"rank": 0, "host": "n1", "plan": "replicate=2", "problem": "", "path": "/data", "is_there": True}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "replicate=2, data at /data"),
    ([{"rank": 0, "host": "n1", "plan": ""}], "not here", "no recipe"),
    ([{**_ONE, "problem": "4 ranks and 3 axes"}], "bad", "4 ranks and 3 axes"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "is_there": False}], "bad", "n2: data.path=/data is not there"),
]
