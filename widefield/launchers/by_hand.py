"""By hand: `widefield train ... --rank 0 --world-size 8 --rendezvous host:29500`, typed once per rank, on whatever hosts.

The options become WIDEFIELD_RANK, WIDEFIELD_WORLD_SIZE and WIDEFIELD_RENDEZVOUS (also file:///shared/path); and, to count none,
WIDEFIELD_LOCAL_RANK and WIDEFIELD_LOCAL_WORLD_SIZE.  Scripts may set the variables.  WIDEFIELD_JOB is a name
for the run, so that ranks of another one at the same address are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from widefield.comm.world import FILE, World
from widefield.launchers import numbers, require

PRIORITY = -10
"""Before torchrun.py: what is typed counts more than what is inherited."""

PLACE = ("WIDEFIELD_RANK", "WIDEFIELD_WORLD_SIZE", "WIDEFIELD_RENDEZVOUS")
LOCAL = ("WIDEFIELD_LOCAL_RANK", "WIDEFIELD_LOCAL_WORLD_SIZE")
JOB_NAME = "WIDEFIELD_JOB"
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]@]+)):(?P<port>\d+)")


def detect(environment: Mapping[str, str]) -> World | None:
    """The World of what was typed; None where nothing was.  ValueError: a part of it is missing, or the place is no place."""
    if not any(environment.get(name) for name in PLACE):
        return None
    require(environment, PLACE, launcher="a start by hand")
    rank, size = numbers(environment, PLACE[:2], launcher="a start by hand")
    local_rank, local_size = (
        numbers(environment, LOCAL, launcher="a start by hand") if any(environment.get(name) for name in LOCAL) else (0, 0)
    )
    if size == 1:
        local_size = 1
    address, port = meeting_place(environment[PLACE[2]])
    return World(rank, size, local_rank, local_size, address, port, "by hand", environment.get(JOB_NAME, ""))


def meeting_place(text: str) -> tuple[str, int]:
    """(address, port) of `host:29500`, `[::1]:29500`, `file:///path`.  ValueError: it is none of these.

    >>> meeting_place("node-1:29500"), meeting_place("[fe80::1]:29500"), meeting_place("file:///shared/run-7")
    (('node-1', 29500), ('fe80::1', 29500), ('file:///shared/run-7', 0))
    """
    if text.startswith(FILE):
        if not text.startswith(f"{FILE}/") or text == f"{FILE}/":
            raise ValueError(f"the rendezvous {text!r} names no file; write an absolute path, as file:///shared/run-7")
        return text, 0
    found = _HOST_PORT.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        login, _, rest = text.rpartition("@")
        shown = f"***@{rest}" if login else text
        raise ValueError(
            f"the rendezvous {shown!r} is no host and port; write rank 0's host and a port that is free there, as host:29500, "
            "or a file that all hosts share, as file:///shared/run-7"
        )
    return found["v6"] or found["host"], int(found["port"])


_RANK_1 = {"WIDEFIELD_RANK": "1", "WIDEFIELD_WORLD_SIZE": "4", "WIDEFIELD_RENDEZVOUS": "n0:29500"}

CASES: list[tuple[dict[str, str], World | str | None]] = [
    ({}, None),
    (_RANK_1, World(1, 4, 0, 0, "n0", 29500, "by hand")),
    ({**_RANK_1, "RANK": "3"}, World(1, 4, 0, 0, "n0", 29500, "by hand")),
    ({**_RANK_1, "WIDEFIELD_JOB": "first"}, World(1, 4, 0, 0, "n0", 29500, "by hand", "first")),
    (
        {**_RANK_1, "WIDEFIELD_LOCAL_RANK": "1", "WIDEFIELD_LOCAL_WORLD_SIZE": "2"},
        World(1, 4, 1, 2, "n0", 29500, "by hand"),
    ),
    ({**_RANK_1, "WIDEFIELD_RENDEZVOUS": "file:///s/x"}, World(1, 4, 0, 0, "file:///s/x", 0, "by hand")),
    ({**_RANK_1, "WIDEFIELD_RANK": "0", "WIDEFIELD_WORLD_SIZE": "1"}, World(0, 1, 0, 1, "n0", 29500, "by hand")),
    ({"WIDEFIELD_RANK": "0"}, "half set: it has WIDEFIELD_RANK=0 and lacks WIDEFIELD_WORLD_SIZE, WIDEFIELD_RENDEZVOUS"),
    ({**_RANK_1, "WIDEFIELD_LOCAL_RANK": "0"}, "lacks WIDEFIELD_LOCAL_WORLD_SIZE"),
    ({**_RANK_1, "WIDEFIELD_RANK": "one"}, "WIDEFIELD_RANK='one' is not a whole number"),
    ({**_RANK_1, "WIDEFIELD_RENDEZVOUS": "n0"}, "the rendezvous 'n0' is no host and port"),
    ({**_RANK_1, "WIDEFIELD_RENDEZVOUS": "n0:99999"}, "the rendezvous 'n0:99999' is no host and port"),
    ({**_RANK_1, "WIDEFIELD_RENDEZVOUS": "me:pass@n0:1"}, "the rendezvous '\\*\\*\\*@n0:1' is no host and port"),
    ({**_RANK_1, "WIDEFIELD_RENDEZVOUS": "file://x"}, "names no file; write an absolute path"),
]
