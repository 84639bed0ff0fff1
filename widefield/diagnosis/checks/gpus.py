"""Has each rank a GPU of its own, are all of one kind, and are they free?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from widefield.comm.devices import ranks_per_gpu
from widefield.diagnosis.finding import Facts, Finding, State, differing, who
from widefield.diagnosis.place import Surroundings
from widefield.planner.machines.catalogue import gpu_named
from widefield.quantity import bytes_text

ORDER, TITLE, MESSAGES = 28, "GPUs", False
FREE = 0.9
"""Of the memory: below, another process is on the GPU."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    cluster = surroundings.cluster
    named = "" if cluster is None or cluster.device.is_cpu else cluster.device.name
    facts: dict[str, Any] = {"count": torch.cuda.device_count(), "ranks": surroundings.world.local_size, "named": named}
    if not facts["count"]:
        return facts
    index = surroundings.world.local_rank % facts["count"]
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    known = gpu_named(properties.name, total)
    facts |= {"name": properties.name, "kind": known.name if known else properties.name, "free": free, "total": total}
    return facts | {"card": str(getattr(properties, "uuid", index)), "shares": ranks_per_gpu()}


def judge(facts: Sequence[Facts]) -> Finding:
    have = [one for one in facts if one["count"]]
    if len(have) < len(facts):
        without = [one for one in facts if not one["count"]]
        if have or facts[0]["named"]:
            wanted = facts[0]["named"] or have[0]["name"]
            return Finding("bad", f"{who(without)} has no GPU, and {wanted} is wanted", "see CUDA and driver above")
        return Finding("not here", "no GPU")
    crowded = [one for one in have if one["ranks"] > one["count"] * one["shares"]]
    if crowded:
        figure = f"{who(crowded)} has {crowded[0]['count']} GPUs for {crowded[0]['ranks']} ranks"
        return Finding("bad", figure, "start one rank per GPU")
    cards = Counter((one["host"], one["card"]) for one in have)
    shared = [card for card, count in cards.items() if count > have[0]["shares"]]
    if shared:
        figure = f"{max(cards.values())} ranks are on one GPU of {shared[0][0]}"
        return Finding("bad", figure, "choose the GPU by the rank on the machine (LOCAL_RANK), not by 0 or the rank among all")
    return _of_kinds(have)


def _of_kinds(have: Sequence[Facts]) -> Finding:
    first = have[0]
    if told := differing(have, "name"):
        return Finding("warn", f"kinds differ: {told}", "the slowest sets the pace of every step; use one kind")
    if first["named"] and first["named"] != first["kind"]:
        return Finding("warn", f"{first['name']}, and --cluster names {first['named']}", "name the machines that are there")
    taken = [one for one in have if one["free"] < FREE * one["total"]]
    if taken:
        worst = min(taken, key=lambda one: one["free"])
        figure = (
            f"rank {worst['rank']} on {worst['host']}: {bytes_text(worst['free'])} of {bytes_text(worst['total'])} are free"
        )
        return Finding("warn", figure, "nvidia-smi shows whose process has the rest")
    return Finding("ok", f"{len(have)} x {first['name']}, {bytes_text(first['total'])} each")


_G = 2**30
_ONE = {"rank": 0, "host": "n1", "count": 2, "ranks": 2, "named": "", "name": "NVIDIA L4", "kind": "L4", "free": 22 * _G,
        "total": 22 * _G, "card": "a", "shares": 1}  # fmt: skip
_TWO = {**_ONE, "rank": 1, "card": "b"}
_NONE = {"rank": 0, "host": "n1", "count": 0, "ranks": 2, "named": ""}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, _TWO], "ok", "2 x NVIDIA L4, 22 GiB each"),
    ([_NONE], "not here", "no GPU"),
    ([{**_NONE, "named": "H100-80G"}], "bad", "n1 has no GPU, and H100-80G is wanted"),
    ([_ONE, {**_NONE, "rank": 1, "host": "n2"}], "bad", "n2 has no GPU"),
    ([{**_ONE, "ranks": 4}], "bad", "n1 has 2 GPUs for 4 ranks"),
    ([_ONE, {**_TWO, "card": "a"}], "bad", "2 ranks are on one GPU of n1"),
    ([_ONE, {**_TWO, "host": "n2", "name": "NVIDIA T4"}], "warn", "kinds differ: n1: NVIDIA L4; n2: NVIDIA T4"),
    ([{**_ONE, "named": "H100-80G"}, _TWO], "warn", "--cluster names H100-80G"),
    ([_ONE, {**_TWO, "free": 2 * _G}], "warn", "rank 1 on n1: 2.0 GiB of 22 GiB are free"),
]
