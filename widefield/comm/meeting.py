"""The store through which ranks find each other, in a first rendezvous and in later ones.

A process may train and then evaluate, and so open a process group twice.  It uses one store for both.  A launcher's store still
has the keys of the first time; and where rank 0 serves the store, another rank could come to the second rendezvous before the
first store is closed.  So each rendezvous has a key prefix of its own.

A launcher may serve the store, as torchrun and local.py do, and for several starts of the ranks (starts.py); else rank 0 does.
The rendezvous may also be a file that all
machines share: rank 0 writes into it where its store is, and the others read it (meeting_file.py).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from widefield.comm import meeting_file, roll_call, starts
from widefield.comm.interfaces import choose_interface, is_of_this_machine, listening_socket, route_to
from widefield.comm.keepalive import asking_whether_alive
from widefield.comm.world import FILE, World

SECONDS = "WIDEFIELD_RENDEZVOUS_SECONDS"
"""Environment variable: how long the ranks of a run wait for each other at its start; 600 where it is not set."""
PROBE = datetime.timedelta(seconds=5)
"""How long a process that finds its port taken tries to find out by whom."""
ANSWER_SECONDS = 2.0
"""How much longer than its own time a connection may take before it counts as one to a program that is no store."""
RESOLVE_SECONDS = 120.0
"""How long a pod waits for the name of the first pod: a Service knows it only when that has an address."""


@dataclass(frozen=True)
class _Meeting:
    """store: with the keys of this start of the ranks alone."""

    store: dist.Store
    cards: list[roll_call.Card]


_open: dict[str, _Meeting] = {}
"""By address, as host:port or file:///path."""
_meetings = itertools.count()


def rendezvous_seconds() -> float:
    """How long ranks wait for each other.  ValueError: the environment variable is no number of seconds."""
    text = os.environ.get(SECONDS, "600").strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{SECONDS}={text!r} is no number of seconds; set it to 1 or more, or leave it out")
    return float(text)


def host_of_meeting() -> dist.TCPStore:
    """A store on a free port of this machine, for ranks that find it as torchrun's find their agent's.

    It listens on 127.0.0.1 alone: the full name of a machine often does not resolve, and nobody else is to come.
    """
    return _served(listening_socket("127.0.0.1", 0, has_one_host=True), "127.0.0.1", datetime.timedelta(seconds=300))


def store_of_meeting(world: World, *, timeout: datetime.timedelta, gpu: str | None = None) -> dist.Store:
    """The store for the rendezvous that begins now, at `world.place`, which the environment has afterwards too.

    The first time, all ranks are waited for and compared, see roll_call.py.  Every rank must call it equally often, since the
    calls number the key prefixes.  gpu: the identity of this rank's GPU, where no other rank may have it.
    ValueError: the address does not resolve, the port is in use, the other ranks do not come within `timeout`, or do not fit.
    """
    if world.place not in _open:
        _open[world.place] = _met(world, timeout, gpu)
    return dist.PrefixStore(f"meeting/{next(_meetings)}", _open[world.place].store)


def placed_on_machine(world: World, *, timeout: datetime.timedelta) -> World:
    """`world` with its rank on its machine: where it is not known, the ranks meet and are counted.  ValueError: as above."""
    if world.local_size:
        return world
    if world.place not in _open:
        _open[world.place] = _met(world, timeout, None)
    local_rank, local_size = roll_call.place_on_machine(_open[world.place].cards, world.rank)
    return replace(world, local_rank=local_rank, local_size=local_size)


def said_by_first_rank(make: Callable[[], str], world: World, *, seconds: float) -> str:
    """The text that rank 0 makes, on every rank, before any group of ranks exists.  Every rank calls it.

    make: called on rank 0 alone; it raises nothing.  seconds: until the text must be there.
    ValueError: the other ranks, or the text, do not come in time.
    """
    store = store_of_meeting(world, timeout=datetime.timedelta(seconds=seconds))
    try:
        if world.rank == 0:
            store.set("text", make())
        return store.get("text").decode()
    except dist.DistError as error:
        raise ValueError(
            f"rank {world.rank} of {world.size} did not hear from rank 0 at {world.place} within {seconds:.0f} s ({error}); "
            "see that it is running and that the port is open between their machines"
        ) from None


def launchers_store(world: World, *, seconds: float) -> dist.Store:
    """A connection of its own to the store that the launcher serves.  DistError: it does not answer."""
    return _client(world.address, world.port, datetime.timedelta(seconds=seconds))


# ------------------------------------------------------------------------------------------------ the first time


def _met(world: World, timeout: datetime.timedelta, gpu: str | None) -> _Meeting:
    began = time.monotonic()
    try:
        with asking_whether_alive():
            store, address, port = _connected(world, timeout)
        os.environ.setdefault("RANK", str(world.rank))
        os.environ.setdefault("WORLD_SIZE", str(world.size))
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        store.set_timeout(timeout)  # one that was looked for, as by a file, waits no longer than that took
        left = lambda: timeout.total_seconds() - (time.monotonic() - began)  # noqa: E731
        served_here = contextlib.nullcontext("start")  # it ends with the rank that serves it
        is_launchers = _is_of_launcher(world)
        with starts.name_of_start(store, world, seconds=left()) if is_launchers else served_here as start:
            own = dist.PrefixStore(f"widefield/{start}", store)
            cards = roll_call.answer(dist.PrefixStore("here", own), world, address=address, gpu=gpu, seconds=left())
    except dist.DistError as error:
        raise ValueError(
            f"rank {world.rank} of {world.size} did not meet the others at {world.place} in {timeout.total_seconds():.0f} s "
            f"({_first_line(error)}); see that all were started and that the port is open between their machines"
        ) from None
    if world.place.startswith(FILE) and world.rank == 0:
        meeting_file.remove(world.address)
    choose_interface(roll_call.address_between(cards, world.rank), has_one_host=roll_call.have_one_host(cards))
    return _Meeting(own, cards)


def _is_of_launcher(world: World) -> bool:
    """Whether the launcher serves the store, and so maybe longer than these ranks live."""
    return world.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _connected(world: World, timeout: datetime.timedelta) -> tuple[dist.TCPStore, str, int]:
    """The store, and where it is.  DistError: it does not answer."""
    if world.place.startswith(FILE):
        return meeting_file.connected(world, timeout, serve=_served, join=_client)
    address = world.address
    if _is_of_launcher(world):
        return _client(address, world.port, timeout), address, world.port
    _check_resolves(world)
    if world.has_one_host:
        address = "127.0.0.1"
    if world.rank:
        return _client(address, world.port, timeout), address, world.port
    try:
        listener = listening_socket(address, world.port, has_one_host=world.has_one_host)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ValueError(f"rank 0 cannot listen at {world.place} ({error}); set MASTER_PORT to another port") from None
        return _holder_of_port(address, world), address, world.port
    store = _served(listener, address, timeout)
    if not world.has_one_host and not is_of_this_machine(address):
        store = _reached(store, world)
    return store, address, world.port


def _reached(own: dist.TCPStore, world: World) -> dist.TCPStore:
    """`own`, or the store of another rank 0 where the others meet, which is no address of this machine.

    The address may lead here all the same, by a translation.  Where it does not answer, it may do so from outside alone.
    ValueError: it answers, and no store is there within PROBE.
    """
    mark, deadline = f"widefield/mark/{secrets.token_hex(8)}", time.monotonic() + PROBE.total_seconds()
    own.set(mark, "1")
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=PROBE.total_seconds()).close()
            there = _client(world.address, world.port, PROBE)
            return own if there.check([mark]) else there
        except (ConnectionRefusedError, dist.DistError):
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise ValueError(
                f"rank 0 is on {socket.gethostname()}, and {world.address}, where the {world.size} ranks are to meet, is no "
                f"address of it: no run listens at {world.place}. Start rank 0 there, or give all ranks an address of "
                f"{socket.gethostname()}, as {route_to(world.address)}"
            ) from None
        except OSError:
            return own


def _holder_of_port(address: str, world: World) -> dist.TCPStore:
    """The store that has the port already; the roll call then says whose it is.  ValueError: it is no store."""
    try:
        return _client(address, world.port, PROBE)
    except dist.DistError:
        raise ValueError(
            f"rank 0 cannot listen at {world.place}: another program has port {world.port} of {socket.gethostname()}; end it "
            f"(ss -ltnp 'sport = :{world.port}' names it), or set MASTER_PORT, or --rendezvous, to a free one on all ranks"
        ) from None


def _served(listener: socket.socket, address: str, timeout: datetime.timedelta) -> dist.TCPStore:
    """The store that this process serves on `listener`, which is its own from now on; it serves as long as it lives."""
    host, port = listener.getsockname()[:2]
    near = host if host not in ("::", "0.0.0.0") else "127.0.0.1"
    return dist.TCPStore(
        near, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _client(address: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A connection to a store that is served elsewhere.  DistError: none answers within `timeout`.

    In a thread, for torch waits without end for the first answer of a program that is no store.
    """
    found: queue.Queue[dist.TCPStore | Exception] = queue.Queue()

    def connect() -> None:
        try:
            found.put(dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            found.put(error)

    threading.Thread(target=connect, name="widefield rendezvous", daemon=True).start()
    try:
        store = found.get(timeout=timeout.total_seconds() + ANSWER_SECONDS)
    except queue.Empty:
        raise dist.DistError(f"a program that is no store of torch's listens at {address}:{port}") from None
    if isinstance(store, Exception):
        raise store
    return store


def _check_resolves(world: World) -> None:
    """ValueError: the address of the rendezvous has no meaning here.  A pod's name may come late."""
    deadline = time.monotonic() + (RESOLVE_SECONDS if world.launcher == "kubernetes" else 0.0)
    while True:
        try:
            socket.getaddrinfo(world.address, world.port)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"rank {world.rank} of {world.size} cannot resolve the meeting place {world.place} ({error}); "
                    f"the environment of {world.launcher} names it: set MASTER_ADDR to a host that every rank can resolve"
                ) from None
        time.sleep(1.0)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].split(" Exception raised from")[0]
