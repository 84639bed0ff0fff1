"""The store through which ranks find each other, in a first rendezvous and in later ones.

A process may train and then evaluate, and so open a process group twice.  It uses one store for both.  A launcher's store still
has the keys of the first time; and where rank 0 serves the store, another rank could come to the second rendezvous before the
first store is closed.  So each rendezvous has a key prefix of its own.
"""

from __future__ import annotations

import datetime
import itertools

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
    """The store for the rendezvous that begins now, at `place` (host:port; the environment has the same address).

    Every rank must call it equally often, since the calls number the key prefixes.
    dist.DistError: the other ranks do not come within `timeout`.
    """
    if place not in _stores:
        _stores[place], _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        _stores[place].set_timeout(timeout)
    return dist.PrefixStore(f"widefield/meeting/{next(_meetings)}", _stores[place])
