"""The store through which ranks find each other, in a first rendezvous and in later ones.

A process may train and then evaluate, and so open a process group twice.  It uses one store for both.  A launcher's store still
has the keys of the first time; and where rank 0 serves the store, another rank could come to the second rendezvous before the
first store is closed.  So each rendezvous has a key prefix of its own.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable

import torch.distributed as dist

_stores: dict[str, dist.Store] = {}
"""By address, as host:port."""
_meetings = itertools.count()


def host_of_meeting() -> dist.TCPStore:
    """A store on a free port of this machine, for ranks that find it as torchrun's find their agent's.

    Its address is 127.0.0.1, for the full name of a machine often does not resolve.
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_of_meeting(*, place: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store for the rendezvous that begins now, at `place` (host:port), which the environment has afterwards too.

    Every rank must call it equally often, since the calls number the key prefixes.
    dist.DistError: the other ranks do not come within `timeout`.
    """
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))
    os.environ.update(zip(("MASTER_ADDR", "MASTER_PORT"), place.rsplit(":", 1), strict=True))
    if place not in _stores:
        _stores[place], _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        _stores[place].set_timeout(timeout)
    return dist.PrefixStore(f"widefield/meeting/{next(_meetings)}", _stores[place])


def said_by_first_rank(make: Callable[[], str], *, place: str, rank: int, size: int, seconds: float) -> str:
    """The text that rank 0 makes, on every rank, before any group of ranks exists.  Every rank calls it.

    make: called on rank 0 alone; it raises nothing.  seconds: until the text must be there.
    ValueError: the other ranks, or the text, do not come in time.
    """
    try:
        store = store_of_meeting(place=place, rank=rank, size=size, timeout=datetime.timedelta(seconds=seconds))
        if rank == 0:
            store.set("text", make())
        return store.get("text").decode()
    except dist.DistError as error:
        raise ValueError(
            f"rank {rank} of {size} did not hear from rank 0 at {place} within {seconds:.0f} s ({error}); see that all ranks "
            "were started and that the port is open between their machines"
        ) from None
