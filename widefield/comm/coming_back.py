"""A rank that died and was started again meets one that lives, in a group of these two: no group takes a rank back.

The launcher's store outlives all ranks.  There the one that came back says so, and both take the name of their group from it.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from widefield.comm.gloo_threads import keep_gloo_from_preempting
from widefield.comm.interfaces import choose_interface
from widefield.comm.meeting import launchers_store
from widefield.comm.world import CAME_BACK, MAY_COME_BACK, World

_KEY = "widefield/came_back"
LOOK_SECONDS = 0.5
MEET_SECONDS = 60.0
"""How long the two wait for each other."""


def may_come_back(environment: Mapping[str, str]) -> bool:
    return environment.get(MAY_COME_BACK) == "1"


def came_back(environment: Mapping[str, str]) -> bool:
    """Whether this process takes the place of one that died."""
    return environment.get(CAME_BACK) == "1"


def meet_again(world: World) -> dist.ProcessGroup:
    """A group of this rank, as rank 0, and the one that waits for those that come back, as rank 1.

    RuntimeError: it does not come within MEET_SECONDS.
    """
    store = launchers_store(world, seconds=MEET_SECONDS)
    choose_interface(world.address, has_one_host=True)
    number = store.add(_KEY, 1)
    store.set(f"{_KEY}/{number}", str(world.rank))
    return _group_of_two(store, number, rank=0)


def _group_of_two(store: dist.Store, number: int, *, rank: int) -> dist.ProcessGroup:
    seconds = datetime.timedelta(seconds=MEET_SECONDS)
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"{_KEY}/{number}", store), rank, 2, seconds)
    keep_gloo_from_preempting()
    return group


class Returns:
    """Waits in a thread for ranks that come back.  came: called there, with the rank and the group in which it is rank 0."""

    def __init__(self, world: World, came: Callable[[int, dist.ProcessGroup], None]) -> None:
        self._store, self._came = launchers_store(world, seconds=MEET_SECONDS), came
        self._seen, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._wait, name="ranks that come back", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                if self._store.add(_KEY, 0) == self._seen:
                    continue
                self._seen += 1
                rank = int(self._store.get(f"{_KEY}/{self._seen}"))
                group = _group_of_two(self._store, self._seen, rank=1)
            except RuntimeError:  # it died again, or the launcher is gone, of which the rank hears elsewhere
                continue
            self._came(rank, group)

    def close(self) -> None:
        self._over.set()


def returns_of(world: World, came: Callable[[int, dist.ProcessGroup], None]) -> Returns | None:
    """None where the launcher starts no rank again by itself."""
    return Returns(world, came) if may_come_back(os.environ) else None
