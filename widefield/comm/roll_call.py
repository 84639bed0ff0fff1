"""Before ranks send each other anything: are all here, each once, of this job, and with the same versions?

Each rank writes a card into the rendezvous store.  Rank 0 waits for all of them, compares, and writes the verdict, which all
ranks read: "" or a problem in words.  A rank that is there twice writes the problem itself.  So whatever is wrong is said on
every rank that came, within the time for the rendezvous.  Where the ranks are, rank 0 writes in one piece: a rank that read the
cards of all would make a million reads of a thousand ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from widefield.comm.world import World
from widefield.installed import version_of

_JOB, _ALL_HERE, _PLACES, _VERDICT = "job", "all here", "places", "verdict"
_PROCESSES, _HERE, _HEARD = "processes", "here", "heard"
"""Keys of the store."""
HEARD_SECONDS = 3.0
"""How long rank 0, which may serve the store, waits for the others to come and read that something is wrong."""
LATER_SECONDS = 10.0
"""How much longer than rank 0 the others wait: it says which ranks are missing."""

Card = Mapping[str, Any]


def answer(store: dist.Store, world: World, *, address: str, gpu: str | None, seconds: float) -> list[Card]:
    """Wait until all ranks of `world` are here; returns every rank's "rank", "machine" and "address", in order.

    address: at which this rank reached the store.  gpu: the identity of this rank's GPU, where no other rank may have it.
    ValueError: a rank is missing, or there twice, or of another job; sizes of the run or versions differ; ranks share a GPU.
    """
    began = time.monotonic()
    left = lambda: datetime.timedelta(seconds=max(0.1, seconds - (time.monotonic() - began)))  # noqa: E731
    _check_job(store, world, left, seconds)
    mine = _card(world, address, gpu)
    number = store.add(f"came/{world.rank}", 1)
    store.add(_PROCESSES, 1)
    store.set(f"card/{world.rank}/{number}", json.dumps(mine))
    first = mine if world.rank == 0 and number == 1 else json.loads(store.get("card/0/1"))
    if number > 1:
        _announce(store, _twice(world, json.loads(store.get(f"card/{world.rank}/1")), mine))
    elif first["size"] != world.size:
        _announce(store, _other_size(first, mine))
    elif store.add(_HERE, 1) == world.size:
        store.set(_ALL_HERE, "1")
    if world.rank == 0:
        _decide(store, world, left(), seconds)
    return _hear(store, world, left() + datetime.timedelta(seconds=LATER_SECONDS), seconds)


def _check_job(store: dist.Store, world: World, left: Callable[[], datetime.timedelta], seconds: float) -> None:
    """ValueError: the store is that of another job, or rank 0 does not come."""
    if world.rank == 0:
        found = store.compare_set(_JOB, "", world.job or "-")
    else:
        try:
            store.wait([_JOB], left())
        except dist.DistError:
            raise ValueError(_missing(store, world, seconds)) from None
        found = store.get(_JOB)
    theirs = found.decode().removeprefix("-")
    if theirs != world.job:
        raise ValueError(
            f"rank {world.rank} of job {world.job or 'without a name'} came to {world.place}, where job "
            f"{theirs or 'without a name'} meets; both were given the same address: give one of them another port"
        )


def _announce(store: dist.Store, problem: str) -> None:
    """Tell all ranks of a problem that this one has found."""
    store.compare_set(_VERDICT, "", problem)
    store.set(_ALL_HERE, "1")


def _twice(world: World, other: Card, mine: Card) -> str:
    return (
        f"two processes say that they are rank {world.rank} of {world.size}: {_process(other)}, and {_process(mine)}; give "
        "every process a rank of its own, from 0 on"
    )


def _other_size(first: Card, mine: Card) -> str:
    return (
        f"ranks disagree on how many they are: rank 0, {_process(first)}, says {first['size']}, and rank {mine['rank']}, "
        f"{_process(mine)}, says {mine['size']}; start all with the same number"
    )


def _decide(store: dist.Store, world: World, wait: datetime.timedelta, seconds: float) -> None:
    """Rank 0 waits for the others and writes the verdict, unless there is one."""
    try:
        store.wait([_ALL_HERE], wait)
        cards = [] if store.check([_VERDICT]) else [json.loads(store.get(f"card/{rank}/1")) for rank in range(world.size)]
        verdict = problem_of(cards)
        store.set(_PLACES, json.dumps([{name: card[name] for name in ("rank", "machine", "address")} for card in cards]))
    except dist.DistError:
        verdict = _missing(store, world, seconds)
    store.compare_set(_VERDICT, "", verdict or "-")


def _hear(store: dist.Store, world: World, wait: datetime.timedelta, seconds: float) -> list[Card]:
    """Where the ranks are.  ValueError: the verdict is a problem, or does not come."""
    try:
        store.wait([_VERDICT], wait)
    except dist.DistError:
        raise ValueError(_missing(store, world, seconds)) from None
    verdict = store.get(_VERDICT).decode().removeprefix("-")
    if not verdict:
        return json.loads(store.get(_PLACES))  # type: ignore[no-any-return]
    with contextlib.suppress(dist.DistError):  # the store may be that of another process, which has heard it all
        store.add(_HEARD, 1)
        deadline = time.monotonic() + HEARD_SECONDS
        while world.rank == 0 and not _all_heard(store, world) and time.monotonic() < deadline:
            time.sleep(0.05)
    raise ValueError(verdict)


def _all_heard(store: dist.Store, world: World) -> bool:
    return store.add(_HERE, 0) >= world.size and store.add(_HEARD, 0) >= store.add(_PROCESSES, 0)


def _missing(store: dist.Store, world: World, seconds: float) -> str:
    here = [rank for rank in range(world.size) if store.check([f"card/{rank}/1"])]
    absent = sorted(set(range(world.size)) - set(here))
    first = _process(json.loads(store.get(f"card/{here[0]}/1"))) if here else "nobody"
    return (
        f"{_ranks(absent)} of {world.size} did not come to {world.place} within {seconds:.0f} s; {len(here)} came, as rank "
        f"{here[0] if here else '-'}, {first}. See that all were started, with the same address, and that the port is open "
        "between their machines"
    )


# ------------------------------------------------------------------------------------------------ cards


def _card(world: World, address: str, gpu: str | None) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "address": address,
        "gpu": gpu,
        "versions": {**versions(), **({} if world.has_one_host else {"widefield's code": code_digest()})},
    }


@functools.cache
def machine() -> str:
    """What is the same for all processes of this machine, or of this pod, and for no others."""
    network = Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot_id()} {os.readlink(network) if network.is_symlink() else ''}"


def boot_id() -> str:
    """What is the same in all containers of a machine until it starts anew; "" where the system does not tell."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else ""


def versions() -> dict[str, str]:
    """What must be the same on all ranks, by name."""
    nccl = {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if torch.cuda.is_available() else {}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"widefield": version_of("widefield"), "torch": str(torch.__version__), "Python": python, **nccl}


@functools.cache
def code_digest() -> str:
    """Twelve digits that change with the code of widefield: two checkouts may have the same version."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def problem_of(cards: list[Card]) -> str:
    """What keeps ranks with these cards from running together; "" where nothing does."""
    for name in dict.fromkeys(name for card in cards for name in card["versions"]):
        having = _grouped(cards, lambda card: card["versions"].get(name, "not there"))  # noqa: B023  called at once
        if len(having) > 1:
            each = "; ".join(f"{value} on {_hosts(those)}" for value, those in having.items())
            return (
                f"{name} is not the same on all machines: {each}. Install the same everywhere: results and messages may differ"
            )
    shared = [those for gpu, those in _grouped(cards, lambda card: card["gpu"]).items() if gpu and len(those) > 1]
    if shared:
        return (
            f"{_ranks(card['rank'] for card in shared[0])} have the same GPU of {shared[0][0]['host']}, and NCCL takes one "
            "rank per GPU; start one rank per GPU, and see what the launcher puts into CUDA_VISIBLE_DEVICES"
        )
    return ""


def place_on_machine(cards: list[Card], rank: int) -> tuple[int, int]:
    """(the rank's number on its machine, how many there are)."""
    same = [card["rank"] for card in cards if card["machine"] == cards[rank]["machine"]]
    return same.index(rank), len(same)


def have_one_host(cards: list[Card]) -> bool:
    """Whether all ranks are on one machine."""
    return len({card["machine"] for card in cards}) == 1


def address_between(cards: list[Card], rank: int) -> str:
    """The address of rank 0's machine on the route to the others: where this rank reached it, or, on that machine, they."""
    there = cards[0]["machine"]
    others = [card["address"] for card in cards if card["machine"] != there]
    return str(others[0] if others and cards[rank]["machine"] == there else cards[rank]["address"])


def _grouped(cards: Iterable[Card], key: Callable[[Card], Any]) -> dict[Any, list[Card]]:
    found: dict[Any, list[Card]] = {}
    for card in cards:
        found.setdefault(key(card), []).append(card)
    return found


def _process(card: Card) -> str:
    return f"process {card['pid']} on {card['host']}"


def _hosts(cards: list[Card]) -> str:
    names = list(dict.fromkeys(card["host"] for card in cards))
    return f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''} ({_ranks(card['rank'] for card in cards)})"


def _ranks(numbers: Iterable[int]) -> str:
    """As `rank 3`, or `ranks 0, 1, 2 and 5 more`."""
    found = list(numbers)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found[:8]))}{more}"
