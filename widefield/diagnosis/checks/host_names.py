"""Do host names resolve to what other hosts can reach?  On Debian and Ubuntu a host's own name is often 127.0.1.1."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, by_host, differing, in_words, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 40, "host names", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    name = socket.gethostname()
    return {
        "name": name, "addresses": _addresses(name), "meeting": surroundings.world.address,
        "meeting_addresses": _addresses(surroundings.world.address), "several": surroundings.several,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }  # fmt: skip


def _addresses(name: str) -> list[str]:
    """What a name resolves to; [] where it does not."""
    try:
        return sorted({str(place[0]) for *_, place in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def judge(facts: Sequence[Facts]) -> Finding:
    lost = [one for one in facts if not one["meeting_addresses"]]
    if lost:
        return Finding("bad", f"{who(lost)}: {lost[0]['meeting']}, where ranks meet, has no address", RESOLVE)
    if not facts[0]["several"]:
        name = facts[0]["name"]
        found = in_words(facts[0]["addresses"]) or "nothing, which gloo takes for 127.0.0.1"
        return Finding("ok", f"one host; {name} resolves to {found}")
    if all(_is_loopback(address) for one in facts for address in one["meeting_addresses"]):
        return Finding("bad", f"ranks on several hosts meet at {facts[0]['meeting']}, which is each host itself", RESOLVE)
    if told := differing(facts, "meeting_addresses"):
        return Finding("warn", f"{facts[0]['meeting']} resolves differently: {told}", RESOLVE)
    return _of_own_names(facts)


def _of_own_names(facts: Sequence[Facts]) -> Finding:
    """gloo listens on what the host's own name resolves to, unless an interface is named."""
    if all(one["interface"] for one in facts):
        return Finding("ok", f"GLOO_SOCKET_IFNAME={facts[0]['interface']} is taken, whatever names resolve to")
    looped = [one for one in facts if not one["addresses"] or all(map(_is_loopback, one["addresses"]))]
    if looped:
        first = looped[0]
        found = in_words(first["addresses"]) or "nothing"
        return Finding("bad", f"{who(looped)}: its own name resolves to {found}, which no other host can reach", LOOPED)
    names = {host: in_words(one["addresses"]) for host, one in by_host(facts).items()}
    return Finding("ok", "; ".join(f"{host}: {found}" for host, found in list(names.items())[:3]))


RESOLVE = "set MASTER_ADDR to a name that getent hosts NAME answers alike on every host, or to rank 0's IP address"
LOOPED = (
    "take the line 127.0.1.1 out of /etc/hosts, or name the card that the hosts share: GLOO_SOCKET_IFNAME=eth0 and "
    "NCCL_SOCKET_IFNAME=eth0 (ip -br address shows the names)"
)

_ONE = {"rank": 0, "host": "n1", "name": "n1", "addresses": ["10.0.0.1"], "meeting": "n1", "meeting_addresses": ["10.0.0.1"],
        "several": True, "interface": ""}  # fmt: skip
_TWO = {**_ONE, "rank": 1, "host": "n2", "name": "n2", "addresses": ["10.0.0.2"]}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, _TWO], "ok", "n1: 10.0.0.1; n2: 10.0.0.2"),
    ([{**_ONE, "several": False, "addresses": []}], "ok", "takes for 127.0.0.1"),
    ([_ONE, {**_TWO, "meeting_addresses": []}], "bad", "n2: n1, where ranks meet, has no address"),
    ([_ONE, {**_TWO, "addresses": ["127.0.1.1"]}], "bad", "n2: its own name resolves to 127.0.1.1"),
    ([_ONE, {**_TWO, "addresses": ["127.0.1.1"], "interface": "eth0"}], "bad", "127.0.1.1"),
    ([{**_ONE, "interface": "eth0"}, {**_TWO, "addresses": ["127.0.1.1"], "interface": "eth0"}], "ok", "eth0 is taken"),
    ([{**one, "meeting": "localhost", "meeting_addresses": ["127.0.0.1"]} for one in (_ONE, _TWO)], "bad", "each host itself"),
    ([_ONE, {**_TWO, "meeting_addresses": ["10.9.0.1"]}], "warn", "n1 resolves differently"),
]
