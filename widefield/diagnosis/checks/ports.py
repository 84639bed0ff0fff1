"""Can every host call every other on a port that the system chooses, as gloo and NCCL do?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 44, "ports", True
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SECONDS = 5.0
FEWEST = 4000
"""Ports to choose from, for the connections of many ranks."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    """Each host's first rank listens, and those of the others call it."""
    mesh = surroundings.mesh
    facts: dict[str, Any] = {"range": _range(), "refused": [], "tried": 0}
    if mesh is None or not surroundings.several:
        return facts
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        is_first = surroundings.world.local_rank == 0
        if is_first:
            listener.bind(("0.0.0.0", 0))
            listener.listen(128)
        mine = (socket.gethostname(), own_address(surroundings), listener.getsockname()[1]) if is_first else None
        listeners = [place for place in mesh.gather_objects(mine) if place is not None]
        if is_first:
            others = [place for place in listeners if place != mine]
            facts["tried"] = len(others)
            facts["refused"] = [told for host, address, port in others if (told := _call(host, address, port))]
        mesh.barrier()
    return facts


def _range() -> list[int]:
    try:
        return [int(part) for part in RANGE.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return []


def own_address(surroundings: Surroundings) -> str:
    """The address from which this host reaches the meeting place; of the host that it is on, what its name resolves to.

    Sends nothing: a datagram's socket only looks up the way.
    """
    world = surroundings.world
    try:
        family, _, _, _, place = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _call(host: str, address: str, port: int) -> str:
    """Empty where the call is taken; else why it is not."""
    until = time.monotonic() + SECONDS
    try:
        with socket.create_connection((address, port), timeout=SECONDS):
            return ""
    except OSError as error:
        why = "no answer" if time.monotonic() >= until else os.strerror(error.errno) if error.errno else str(error)
        return f"{host} at {address}:{port} ({why})"


def judge(facts: Sequence[Facts]) -> Finding:
    refused = [(one["host"], told) for one in facts for told in one["refused"]]
    if refused:
        host, told = refused[0]
        return Finding("bad", f"{host} cannot call {told}{f', and {len(refused) - 1} more' * (len(refused) > 1)}", REMEDY)
    narrow = [one for one in facts if one["range"] and one["range"][1] - one["range"][0] < FEWEST]
    if narrow:
        low, high = narrow[0]["range"]
        return Finding(
            "warn", f"{narrow[0]['host']} has ports {low} to {high} to choose from", "sysctl net.ipv4.ip_local_port_range"
        )
    tried = sum(one["tried"] for one in facts)
    return Finding("ok", f"{tried} calls between hosts were taken" if tried else "one host calls itself")


REMEDY = (
    "open the ports between the hosts of the run in their firewalls, all of net.ipv4.ip_local_port_range: gloo and NCCL listen "
    "on ports that the system chooses, besides MASTER_PORT"
)

_ONE = {"rank": 0, "host": "n1", "range": [32768, 60999], "refused": [], "tried": 1}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, {**_ONE, "rank": 1, "host": "n2"}], "ok", "2 calls between hosts were taken"),
    ([{**_ONE, "tried": 0}], "ok", "one host"),
    ([{**_ONE, "refused": ["n2 at 10.0.0.2:40001 (no answer)"]}], "bad", "n1 cannot call n2 at 10.0.0.2:40001 (no answer)"),
    ([{**_ONE, "range": [32768, 33000]}], "warn", "ports 32768 to 33000"),
]
