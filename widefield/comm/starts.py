"""Which start of the ranks is this?  A launcher's store may outlive them, so each start has a name and keys of its own.

torchrun's agents keep one store over all restarts.  What ranks that have ended left there, as a failure or their addresses, is
not for those that come after them.  Nor do these agree on how many starts there were: where nodes come and go, one agent counts
a restart that another does not.  So rank 0 draws a name for its start.  Every other rank comes with a number that no rank had
before, and rank 0 writes the name beside it; so whoever reads a name was answered by a rank 0 that lived at that time.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Iterator

import torch.distributed as dist

from widefield.comm.keepalive import asking_whether_alive
from widefield.comm.world import World

ANSWER_SECONDS = 0.05
"""How often rank 0 looks who has come."""
_CAME, _NAME_OF = "came", "name of the start of"
"""Keys of the store."""


@contextlib.contextmanager
def name_of_start(store: dist.Store, world: World, *, seconds: float) -> Iterator[str]:
    """The same on all ranks of this start, and on none of another.  Rank 0 keeps it open until all others have met it.

    ValueError: rank 0 does not come within `seconds`.
    """
    desk = dist.PrefixStore(f"widefield/starts/{world.job}", store)
    if world.rank:
        yield _asked(desk, world, seconds)
        return
    name, over = secrets.token_hex(8), threading.Event()
    with asking_whether_alive():
        own = desk.clone()
    thread = threading.Thread(target=_answer, args=(own, name, over), name="widefield start", daemon=True)
    thread.start()
    try:
        yield name
    finally:
        over.set()
        thread.join(1.0)  # it is a daemon; a store that is gone may keep it longer


def _asked(desk: dist.Store, world: World, seconds: float) -> str:
    key = f"{_NAME_OF} {desk.add(_CAME, 1)}"
    try:
        desk.wait([key], datetime.timedelta(seconds=seconds))
    except dist.DistError:
        raise ValueError(
            f"rank 0 of {world.size} did not come to {world.place} within {seconds:.0f} s; rank {world.rank} came. See that "
            "all were started, with the same address, and that the port is open between their machines"
        ) from None
    return desk.get(key).decode()


def _answer(desk: dist.Store, name: str, over: threading.Event) -> None:
    """Write the name for every rank that comes.  Those of earlier starts, who came and did not wait, get it too."""
    told = 0
    with contextlib.suppress(RuntimeError):  # the process that serves the store has ended, which the main thread tells
        while True:
            came = desk.add(_CAME, 0)
            for number in range(told + 1, came + 1):
                desk.set(f"{_NAME_OF} {number}", name)
            told = came
            if over.wait(ANSWER_SECONDS):
                return
