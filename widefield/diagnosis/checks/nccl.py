"""Is NCCL there, and the same on all hosts?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from widefield.diagnosis.finding import Facts, Finding, State, differing, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 26, "NCCL", False
SLOWS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")


def look(surroundings: Surroundings) -> dict[str, Any]:
    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    slows = [f"{name}={os.environ[name]}" for name in SLOWS if os.environ.get(name, "0") not in ("", "0")]
    return {"version": version, "slows": slows}


def judge(facts: Sequence[Facts]) -> Finding:
    if not any(one["version"] for one in facts):
        return Finding("not here", "messages go by gloo")
    if told := differing(facts, "version"):
        return Finding(
            "bad", f"differs between hosts: {told}", "versions of NCCL do not talk to each other: one environment for all"
        )
    slows = [one for one in facts if one["slows"]]
    if slows:
        return Finding(
            "warn", f"{who(slows)}: {', '.join(slows[0]['slows'])} turns a fast way off", "unset it, unless that link is broken"
        )
    return Finding("ok", facts[0]["version"])


_ONE = {"rank": 0, "host": "n1", "version": "2.27.3", "slows": []}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, {**_ONE, "rank": 1, "host": "n2"}], "ok", "2.27.3"),
    ([{**_ONE, "version": ""}], "not here", "gloo"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "version": "2.26.2"}], "bad", "n1: 2.27.3; n2: 2.26.2"),
    ([{**_ONE, "slows": ["NCCL_P2P_DISABLE=1"]}], "warn", "NCCL_P2P_DISABLE=1 turns a fast way off"),
]
