"""At which store do the ranks meet, the first time and again?

A process may train and then evaluate, and so meet the others twice.  The store is one for the whole process: it may be its
launcher's, which keeps what was written at the first meeting, and where rank 0 serves it, another rank could come to the second
meeting before the first store is gone.  So each meeting has a part of the store of its own.
"""

from __future__ import annotations

import datetime
import itertools

import torch.distributed as dist

_stores: dict[str, dist.Store] = {}
"""By where it is."""
_meetings = itertools.count()


def store_of_meeting(*, place: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store for the meeting that begins now, at `place` (host:port, which the environment names too).

    Every rank calls it as often.  dist.DistError where the others do not come.
    """
    if place not in _stores:
        _stores[place], _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        _stores[place].set_timeout(timeout)
    return dist.PrefixStore(f"widefield/meeting/{next(_meetings)}", _stores[place])
