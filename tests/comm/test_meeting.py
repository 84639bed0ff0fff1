"""Ranks meet only where all are there, once each, of one job and one version; else each of them says what is wrong, in time.

All cases run at the same time, forked from one process that has loaded torch.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest

from widefield.comm import interfaces, meeting, roll_call
from widefield.comm.roll_call import place_on_machine, problem_of
from widefield.comm.world import World

pytestmark = pytest.mark.alone

DRIVER = """
import json, os, socket, sys, threading, time
import psutil, torch
from widefield.comm import interfaces, meeting, mesh, roll_call
from widefield.comm.world import World
from widefield.naming import load_all
from widefield.plans import Plan
load_all("widefield.parallel.strategies")  # as the check of a plan would, in each of them
import torch.distributed.tensor, torch._dynamo

def listeners():
    return sorted({one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN})

def life(case, world, wait, odd):
    time.sleep(wait)
    own = odd.pop("own", None)
    if own:  # as if this machine had that address alone
        meeting.listening_socket = lambda address, port, **_: interfaces._bound(socket.AF_INET, (own, port))
        meeting.is_of_this_machine = lambda address: address == own
    there, machine = roll_call.versions(), odd.pop("machine", roll_call.machine())
    roll_call.versions, roll_call.machine = lambda: {**there, **odd}, lambda: machine
    began, found = time.monotonic(), {}
    try:
        plan, cpu = Plan(replicate=world["size"]), torch.device("cpu")
        joined = mesh.join(World(**world), plan, timeout_seconds=case["seconds"], device=cpu)
        found["sum"] = joined.sum_(torch.tensor([float(joined.rank + 1)])).item()
        found["local"] = [joined.world.local_rank, joined.world.local_size]
        found["listeners"] = listeners()
        found["interface"] = os.environ["GLOO_SOCKET_IFNAME"]
        joined.barrier()
    except ValueError as error:
        found["said"] = str(error)
    return {**found, "seconds": time.monotonic() - began}

def fork(case, *life_of):
    pipe, theirs = os.pipe()
    if os.fork() == 0:
        try:
            text = json.dumps(life(case, *life_of))
        except BaseException as error:
            text = json.dumps({"raised": repr(error)})
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    return pipe

pipes = {name: [fork(case, *one) for one in case["lives"]] for name, case in json.load(sys.stdin).items()}
read = lambda pipe: json.loads(os.fdopen(pipe).read() or "null")
print(json.dumps({name: [read(pipe) for pipe in listed] for name, listed in pipes.items()}))
"""
SECONDS = 8.0
"""For the rendezvous of cases in which somebody does not come."""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lives(*ranks: int, size: int, address: str = "127.0.0.1", local: int = 0, **fields) -> list[list]:
    """Processes with these ranks, as (world, seconds until it comes, versions it has).  They come one after the other."""
    port = 0 if address.startswith("file:") else fields.pop("port", None) or free_port()
    worlds = [World(rank, size, rank if local else 0, local, address, port, "tests", **fields) for rank in ranks]
    return [[asdict(world), 0.3 * number, {}] for number, world in enumerate(worlds)]


def several_hosts(*ranks: int, size: int) -> list[list]:
    """Ranks that take each other to be on other machines, though they meet at an address of this one."""
    found = lives(*ranks, size=size, address=interfaces.route_to("127.0.0.1"))
    return [[{**world, "local_size": 1}, wait, {"machine": str(world["rank"])}] for world, wait, _ in found]


def hosts(*lives_at: tuple[int, str]) -> list[list]:
    """Ranks of 2 on machines of which each has one address, and which are to meet at 127.0.0.1: (rank, address) each."""
    found = lives(*(rank for rank, _ in lives_at), size=2)
    return [
        [{**world, "local_size": 1}, wait, {"machine": own, "own": own}]
        for (world, wait, _), (_, own) in zip(found, lives_at, strict=True)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Iterator[dict[str, list[dict]]]:
    folder = tmp_path_factory.mktemp("meeting")
    (folder / "stale").write_text(json.dumps({"addresses": ["127.0.0.1"], "port": free_port(), "mark": "of a dead run"}))
    (folder / "no json").write_text("{")
    shared, busy = free_port(), socket.create_server(("127.0.0.1", 0))
    versions = lives(0, 1, size=2)
    versions[1][2] = {"torch": "9.9"}
    odd = lives(0, 1, size=2)
    odd[1][0]["size"] = 3
    cases = {
        "one host": lives(0, 1, size=2, local=2),
        "counted": lives(0, 1, size=2),
        "several hosts": several_hosts(0, 1, size=2),
        "file": lives(1, 0, size=2, address=f"file://{folder}/new"),
        "stale file": lives(0, 1, size=2, address=f"file://{folder}/stale"),
        "two of rank 0": lives(0, 0, 1, size=2),
        "two of rank 0, by file": lives(0, 0, size=2, address=f"file://{folder}/twice"),
        "two of rank 0, on two hosts": hosts((0, "127.0.0.1"), (0, "127.0.0.2"), (1, "127.0.0.3")),
        "two of rank 0, the wrong host first": hosts((0, "127.0.0.2"), (0, "127.0.0.1"), (1, "127.0.0.3")),
        "rank 0 on another host": hosts((0, "127.0.0.2")),
        "an address that leads here": hosts((0, "0.0.0.0"), (1, "127.0.0.3")),
        "two of rank 1": lives(1, 0, 1, size=3),
        "missing": lives(0, 1, size=4),
        "rank 0 missing, by file": lives(1, size=2, address=f"file://{folder}/no json"),
        "no folder": lives(0, size=2, address=f"file://{folder}/none/x"),
        "port in use": lives(0, 1, size=2, port=busy.getsockname()[1]),
        "another job": [*lives(0, size=2, port=shared, job="A"), *lives(1, 0, size=2, port=shared, job="B")],
        "no such host": lives(0, 1, size=2, address="no such host"),
        "versions": versions,
        "sizes": odd,
    }
    told = {name: {"lives": each, "seconds": 60.0 if name in FINE else SECONDS} for name, each in cases.items()}
    with busy:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER], input=json.dumps(told), capture_output=True, text=True, timeout=180
        )
    assert done.returncode == 0, done.stderr
    yield {**json.loads(done.stdout), "left": sorted(path.name for path in folder.iterdir())}


FINE = ["one host", "counted", "several hosts", "file", "stale file", "an address that leads here"]


@pytest.mark.parametrize("case", FINE)
def test_ranks_meet_and_their_messages_arrive(found, case):
    assert [one.get("sum") for one in found[case]] == [3.0, 3.0], found[case]
    ranks = [1, 0] if case == "file" else [0, 1]
    assert [one["local"] for one in found[case]] == (
        [[0, 1], [0, 1]] if case in ("several hosts", "an address that leads here") else [[rank, 2] for rank in ranks]
    )


def test_ranks_of_one_machine_listen_on_the_loopback_alone(found):
    for case in ("one host", "counted"):
        for one in found[case]:
            assert one["listeners"] and {address.removeprefix("::ffff:") for address in one["listeners"]} == {"127.0.0.1"}
            assert one["interface"] == "lo"


def test_ranks_of_several_machines_listen_where_the_others_can_reach_them(found):
    """On the address of the interface on the route to rank 0; not on all of them, where rank 0's host has such an address."""
    address = interfaces.route_to("127.0.0.1")
    for one in found["several hosts"]:
        assert one["interface"] == interfaces.interface_of(address)
        if not interfaces.is_loopback(address):
            assert set(one["listeners"]) == {address}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two of rank 0", "two processes say that they are rank 0 of 2: process "),
        ("two of rank 0, by file", "two processes say that they are rank 0 of 2: process "),
        ("two of rank 0, on two hosts", "two processes say that they are rank 0 of 2: process "),
        ("two of rank 0, the wrong host first", "two processes say that they are rank 0 of 2: process "),
        ("rank 0 on another host", ", and 127.0.0.1, where the 2 ranks are to meet, is no address of it: no run listens at "),
        ("two of rank 1", "two processes say that they are rank 1 of 3: process "),
        ("missing", "ranks 2, 3 of 4 did not come to 127.0.0.1:"),
        ("rank 0 missing, by file", "rank 1 of 2 found no run at "),
        ("no folder", "which is not there; name a folder that all machines share"),
        ("no such host", "cannot resolve the meeting place no such host:"),
        ("versions", "torch is not the same on all machines: "),
        ("sizes", "ranks disagree on how many they are: rank 0, process "),
    ],
)
def test_what_is_wrong_is_said_by_every_rank_within_the_time(found, case, words):
    assert [one.get("said", "").count(words) for one in found[case]] == [1] * len(found[case]), found[case]
    assert all(one["seconds"] < SECONDS + roll_call.LATER_SECONDS for one in found[case])


def test_versions_are_told_with_their_ranks(found):
    assert "; 9.9 on " in found["versions"][0]["said"] and "(rank 1)" in found["versions"][0]["said"]


def test_a_port_in_use_is_told_by_the_rank_that_needs_it_and_the_others_do_not_wait_for_ever(found):
    first, second = found["port in use"]
    assert "rank 0 cannot listen at 127.0.0.1:" in first["said"] and "another program has port" in first["said"]
    assert "rank 1 of 2 did not meet the others at 127.0.0.1:" in second["said"]
    assert second["seconds"] < 3 * SECONDS


def test_a_run_takes_none_of_another_jobs_ranks(found):
    first, *others = found["another job"]
    assert "rank 1 of 2 did not come to 127.0.0.1:" in first["said"]
    for rank, one in zip((1, 0), others, strict=True):
        assert f"rank {rank} of job B came to 127.0.0.1:" in one["said"] and "where job A meets" in one["said"]


def test_a_file_is_removed_when_all_have_met(found):
    assert found["left"] == ["no json", "twice"]


# ------------------------------------------------------------------------------------------------ one process


def card(rank: int, host: str = "a", gpu: str | None = None, **versions: str) -> dict:
    return {
        "rank": rank,
        "size": 3,
        "host": host,
        "machine": host,
        "pid": 7,
        "gpu": gpu,
        "versions": {"torch": "1", **versions},
    }


def test_ranks_that_share_a_gpu_are_told():
    cards = [card(0, gpu="x"), card(1, gpu="y"), card(2, gpu="x")]
    assert "ranks 0, 2 have the same GPU of a, and NCCL takes one rank per GPU" in problem_of(cards)
    assert problem_of([card(0, gpu="x"), card(1, gpu="y"), card(2)]) == ""


def test_a_version_that_only_some_have_is_told():
    cards = [card(0, NCCL="2.27.3"), card(1, NCCL="2.27.3"), card(2, "b")]
    assert "NCCL is not the same on all machines: 2.27.3 on a (ranks 0, 1); not there on b (rank 2)" in problem_of(cards)


def test_the_code_counts_where_there_are_several_machines():
    one, several = (roll_call._card(World(0, 2, 0, local), "a", None)["versions"] for local in (2, 1))
    assert several == {**one, "widefield's code": roll_call.code_digest()} and len(roll_call.code_digest()) == 12


def test_the_interface_of_rank_0s_machine_is_that_at_which_others_reached_it():
    cards = [
        {**card(0, "a"), "address": "docker"},
        {**card(1, "b"), "address": "ethernet"},
        {**card(2, "a"), "address": "docker"},
    ]
    assert [roll_call.address_between(cards, rank) for rank in range(3)] == ["ethernet"] * 3
    assert roll_call.address_between([cards[0], cards[2]], 1) == "docker"


def test_ranks_are_counted_machine_by_machine():
    cards = [card(0, "a"), card(1, "b"), card(2, "a")]
    assert [place_on_machine(cards, rank) for rank in range(3)] == [(0, 2), (0, 1), (1, 2)]


def test_the_interface_is_that_of_the_route_unless_the_user_names_one(monkeypatch):
    for variable in interfaces.VARIABLES:
        monkeypatch.setenv(variable, "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert interfaces.choose_interface("127.0.0.1", has_one_host=True) == "lo"
    import os

    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("mine", "lo")
    assert interfaces.interface_of("192.0.2.77") is None


def test_a_store_that_a_file_names_is_asked_as_long_as_ranks_wait_for_each_other(tmp_path, monkeypatch):
    """Not as short as its addresses were tried: rank 0 may be slow, where a machine has much to do."""

    def answer(store, world, **_):
        raise ValueError(f"waits {store.timeout.total_seconds():.0f} s")

    monkeypatch.setattr(roll_call, "answer", answer)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    serving, joining = (World(rank, 2, rank, 2, f"file://{tmp_path}/new", launcher="tests") for rank in (0, 1))
    served = meeting._connected(serving, timedelta(seconds=30))
    with pytest.raises(ValueError, match="waits 30 s"):
        meeting._met(joining, timedelta(seconds=30), None)
    assert served[2]


@pytest.mark.parametrize("text", ["soon", "0", "-1"])
def test_a_time_for_the_rendezvous_that_is_none_is_refused(text, monkeypatch):
    from widefield.comm.meeting import rendezvous_seconds

    monkeypatch.setenv("WIDEFIELD_RENDEZVOUS_SECONDS", text)
    with pytest.raises(ValueError, match=f"WIDEFIELD_RENDEZVOUS_SECONDS='{text}' is no number of seconds"):
        rendezvous_seconds()


def test_examples_of_a_meeting_place_hold():
    import doctest

    from widefield.launchers import by_hand

    assert doctest.testmod(by_hand).failed == 0 and Path(by_hand.__file__).is_file()
