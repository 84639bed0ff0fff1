"""Is the network card there that the variables name, and is it one that other hosts reach?"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, in_words, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 42, "interfaces", False
NAMED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOCAL_ONLY = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "tunl", "dummy")
"""Beginnings of names of interfaces that lead to no other host."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    names = sorted(name for _, name in socket.if_nameindex())
    named = {name: os.environ[name] for name in NAMED if os.environ.get(name)}
    return {"names": names, "named": named, "several": surroundings.several}


def wanted_of(setting: str, names: Sequence[str]) -> list[str]:
    """The interfaces that a setting means: `eth0`, beginnings as `eth,ib`, exact ones as `=eth0`, all others as `^lo,docker`.

    >>> wanted_of("eth", ["eth0", "lo"]), wanted_of("^lo", ["eth0", "lo"]), wanted_of("=eth", ["eth0"])
    (['eth0'], ['eth0'], [])
    """
    sign, parts = setting[:1], [part for part in setting.lstrip("^=").split(",") if part]
    if sign == "=":
        return [name for name in names if name in parts]
    fits = [name for name in names if name.startswith(tuple(parts))]
    return [name for name in names if name not in fits] if sign == "^" else fits


def judge(facts: Sequence[Facts]) -> Finding:
    for one in facts:
        for variable, setting in one["named"].items():
            fits = wanted_of(setting, one["names"])
            if not fits:
                has = in_words(one["names"], most=6)
                return Finding("bad", f"{who([one])}: {variable}={setting}, and there are {has}", "name one that is there")
            if one["several"] and all(name.startswith(LOCAL_ONLY) for name in fits):
                return Finding("bad", f"{who([one])}: {variable}={setting} is {fits[0]}, which reaches no other host", REMEDY)
    if not facts[0]["several"]:
        return Finding("ok", "one host")
    alone = [one for one in facts if all(name.startswith(LOCAL_ONLY) for name in one["names"])]
    if alone:
        return Finding("bad", f"{who(alone)} has {in_words(alone[0]['names'])} alone, which reach no other host", REMEDY)
    bridges = sorted({name for one in facts for name in one["names"] if name.startswith(("docker", "virbr", "br-"))})
    if bridges and not facts[0]["named"]:
        return Finding("warn", f"{in_words(bridges)} may be taken for the network between hosts", REMEDY)
    return Finding("ok", in_words([name for name in facts[0]["names"] if not name.startswith(LOCAL_ONLY)], most=6))


REMEDY = (
    "name the card that the hosts share: NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 (ip -br address); containers need "
    "--network host"
)

_ONE = {"rank": 0, "host": "n1", "names": ["eth0", "lo"], "named": {}, "several": True}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "eth0"),
    ([{**_ONE, "names": ["lo"], "several": False}], "ok", "one host"),
    ([{**_ONE, "named": {"GLOO_SOCKET_IFNAME": "ib0"}}], "bad", "GLOO_SOCKET_IFNAME=ib0, and there are eth0 and lo"),
    ([{**_ONE, "named": {"NCCL_SOCKET_IFNAME": "lo"}}], "bad", "NCCL_SOCKET_IFNAME=lo is lo, which reaches no other host"),
    ([{**_ONE, "names": ["docker0", "lo"]}], "bad", "docker0 and lo alone"),
    ([{**_ONE, "names": ["docker0", "eth0", "lo"]}], "warn", "docker0 may be taken"),
    ([{**_ONE, "names": ["docker0", "eth0", "lo"], "named": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}], "ok", "eth0"),
]
