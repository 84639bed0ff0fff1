"""Which ranks are there, and is rank 0 where the others look for it?"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host, in_words, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 10, "launcher", False
REMEDY = (
    "start all ranks with one launcher, and rank 0 on the host that MASTER_ADDR names: its name as hostname -f says it there, "
    "or its IP address"
)


def look(surroundings: Surroundings) -> dict[str, Any]:
    world = surroundings.world
    return {
        "launcher": world.launcher, "size": world.size, "local_rank": world.local_rank, "local_size": world.local_size,
        "address": world.address, "is_mine": is_of_this_host(world.address), "pid": os.getpid(),
        "agent": os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    }  # fmt: skip


def is_of_this_host(address: str) -> bool:
    """Whether a socket can listen on what the name resolves to, as on one of this host's own addresses alone."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def _can_bind(family: int, place: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
            return True
    except OSError:
        return False


def judge(facts: Sequence[Facts]) -> Finding:
    first, hosts = facts[0], by_host(facts)
    ranks = Counter(one["rank"] for one in facts)
    twice = [str(rank) for rank, count in ranks.items() if count > 1]
    if twice:
        return Finding("bad", f"rank {in_words(twice)} is there twice, on {who(facts)}", REMEDY)
    if len(facts) < first["size"]:
        return Finding("bad", f"{len(facts)} of {first['size']} ranks are there, on {who(facts)}", REMEDY)
    figure = f"{first['size']} by {first['launcher']} on {who(facts)}, meeting at {first['address']}"
    if first["size"] == 1:
        return Finding("ok", f"one rank, on {who(facts)}")
    if first["rank"] == 0 and not first["is_mine"] and not first["agent"]:
        return Finding("bad", f"rank 0 is on {first['host']}, and {first['address']} is no address of that host", REMEDY)
    crowd = {host: sum(one["host"] == host for one in facts) for host in hosts}
    wrong = [host for host, one in hosts.items() if crowd[host] != one["local_size"]]
    state: State = "warn" if wrong else "ok"
    more = f"; {in_words(wrong)} has another number of ranks than its launcher says" if wrong else ""
    return Finding(state, figure + more, "two hosts with one name, or two launchers: start under one alone")


_ONE = {"rank": 0, "host": "n1", "launcher": "torchrun", "size": 2, "local_rank": 0, "local_size": 1, "address": "n1",
        "is_mine": True, "pid": 5, "agent": False}  # fmt: skip
_TWO = {**_ONE, "rank": 1, "host": "n2", "is_mine": False}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, _TWO], "ok", "2 by torchrun on n1 and n2, meeting at n1"),
    ([{**_ONE, "size": 1}], "ok", "one rank, on n1"),
    ([_ONE, {**_TWO, "rank": 0}], "bad", "rank 0 is there twice"),
    ([_ONE], "bad", "1 of 2 ranks are there"),
    ([{**_ONE, "is_mine": False}, _TWO], "bad", "rank 0 is on n1, and n1 is no address of that host"),
    ([_ONE, {**_TWO, "host": "n1"}], "warn", "n1 has another number of ranks"),
]
