"""A file that all machines share as the place to meet: `--rendezvous file:///shared/run-7`.

Rank 0 serves a store on a free port and writes into the file where: {"addresses": [...], "port": ..., "mark": ...}.  The others
wait for the file, and try its addresses until a store answers that has the mark.  So a file that a dead run has left does no
harm.  Rank 0 removes the file when all have met.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from widefield.comm.interfaces import addresses, is_loopback, listening_socket
from widefield.comm.world import FILE, World

TRY = datetime.timedelta(seconds=2)
"""How long an address of the file may take to answer."""
POLL_SECONDS = 0.2
_MARK = "widefield/mark"

Found = tuple[dist.TCPStore, str, int]
Serve = Callable[[socket.socket, str, datetime.timedelta], dist.TCPStore]
Join = Callable[[str, int, datetime.timedelta], dist.TCPStore]


def path_of(address: str) -> Path:
    """The file of `file:///path`.  ValueError: it is no absolute path, or its folder is not there."""
    path = Path(address.removeprefix(FILE))
    if not path.is_absolute() or path.is_dir():
        raise ValueError(f"{address} names no file; write an absolute path, as file:///shared/run-7")
    if not path.parent.is_dir():
        raise ValueError(f"{address} is in {path.parent}, which is not there; name a folder that all machines share")
    return path


def connected(world: World, timeout: datetime.timedelta, *, serve: Serve, join: Join) -> Found:
    """(the store, the address and the port where it is).

    serve, join: open a store on a socket, and one that is served elsewhere.
    ValueError: the file cannot be written, or no store answers within `timeout`.
    """
    path = path_of(world.address)
    if world.rank == 0:
        return _found(path, join) or _written(path, world, timeout, serve)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        found = _found(path, join)
        if found is not None:
            return found
        time.sleep(POLL_SECONDS)
    raise ValueError(
        f"rank {world.rank} of {world.size} found no run at {path} within {timeout.total_seconds():.0f} s "
        f"({'rank 0 of the file does not answer' if path.exists() else 'there is no such file'}); see that rank 0 was started, "
        "that all machines share the file, and that they reach each other"
    )


def remove(address: str) -> None:
    path_of(address).unlink(missing_ok=True)


def _written(path: Path, world: World, timeout: datetime.timedelta, serve: Serve) -> Found:
    """Serve a store and write where it is."""
    listener = listening_socket("", 0, has_one_host=world.has_one_host)
    port = listener.getsockname()[1]
    own = [address for _, address in addresses() if not is_loopback(address) and not address.startswith("fe80:")]
    reachable = ["127.0.0.1"] if world.has_one_host else [*own, "127.0.0.1"]
    store = serve(listener, reachable[0], timeout)
    mark = uuid.uuid4().hex
    store.set(_MARK, mark)
    part = path.with_name(f"{path.name}.{mark[:8]}.part")
    try:
        part.write_text(json.dumps({"addresses": reachable, "port": port, "mark": mark}), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ValueError(f"{path} cannot be written ({error}); name a file in a folder that all machines can write") from None
    return store, reachable[0], port


def _found(path: Path, join: Join) -> Found | None:
    """The store that the file names, if it answers and has the file's mark."""
    told = _read(path)
    for address in told.get("addresses", ()) if told else ():
        with contextlib.suppress(dist.DistError, OSError, ValueError):
            socket.create_connection((address, told["port"]), TRY.total_seconds()).close()
            store = join(address, told["port"], TRY)
            if store.check([_MARK]) and store.get(_MARK).decode() == told["mark"]:
                return store, address, told["port"]
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet
        return {}
    is_ours = isinstance(found, dict) and isinstance(found.get("port"), int) and isinstance(found.get("mark"), str)
    return found if is_ours and isinstance(found.get("addresses"), list) else {}
