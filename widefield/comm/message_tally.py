"""The messages between two ranks that this rank has posted: how many to whom, and in which order in this step and the last.

torch counts the collectives of a group, and not these.  Where ranks wait for each other, the counts of both sides say which
message is missing; and a rank whose messages are not those of its step before is the one that took another way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist

from widefield.private_torch.process_groups import resolve_process_group

Way = Literal["send", "receive"]
Post = tuple[Way, str, int]
"""Its way, the name of its group, and the other rank in the group."""


class MessageTally:
    """Counts what is posted while it is open."""

    def __init__(self) -> None:
        self.posted = 0
        self._counts: Counter[Post] = Counter()
        self._step: list[Post] = []
        self._begun = False
        self._before: list[Post] | None = None
        """The posts of the step before; None in the first."""

    def note(self, way: Way, group: dist.ProcessGroup, peer: int) -> None:
        """One message is posted.  peer: the other rank in the group."""
        post = (way, group.group_name, peer)
        self.posted += 1
        self._counts[post] += 1
        self._step.append(post)

    def begin_step(self) -> None:
        self._before, self._step = (self._step if self._begun else None), []
        self._begun = True

    def by_rank(self, way: Way) -> dict[str, int]:
        """How many messages have been posted, by the other rank among all."""
        found: Counter[str] = Counter()
        for (one, name, peer), count in list(self._counts.items()):
            if one == way:
                found[str(dist.get_global_rank(resolve_process_group(name), peer))] += count
        return dict(found)

    def odd(self) -> str:
        """In what the posts of this step differ from those of the step before, as far as both go; empty where they do not.

        A step with some differs from one without any, too.
        """
        step, before = list(self._step), self._before
        if before is None:
            return ""
        if step and not before:
            return f"message 1 of this step is {_in_words(step[0])}, and the step before had none"
        for number, (post, was) in enumerate(zip(step, before, strict=False), 1):
            if post != was:
                return f"message {number} of this step is {_in_words(post)}, and was {_in_words(was)} in the step before"
        return ""


def _in_words(post: Post) -> str:
    way, name, peer = post
    rank = dist.get_global_rank(resolve_process_group(name), peer)
    return f"a send to rank {rank}" if way == "send" else f"a receive from rank {rank}"


_open: list[MessageTally] = []


def note(way: Way, group: dist.ProcessGroup, peer: int) -> None:
    """One message between two ranks is posted on this rank.  A pair that met later has no name, and is not counted."""
    for tally in _open if hasattr(group, "group_name") else ():
        tally.note(way, group, peer)


@contextmanager
def counted(tally: MessageTally, *, of_stages: bool) -> Iterator[None]:
    """Inside, the tally counts.  of_stages: the messages that torch's pipeline schedules post too."""
    _open.append(tally)
    try:
        if not of_stages:
            yield
            return
        from widefield.private_torch.pipelining import messages_of_stages  # imported late, see there

        with messages_of_stages(_noted):
            yield
    finally:
        _open.remove(tally)


def _noted(post: Callable[..., Any]) -> Callable[..., Any]:
    def counting(operations: list[dist.P2POp], desc: str | None = None) -> Any:
        for one in operations:
            note("send" if one.op is dist.isend else "receive", one.group, one.group_peer)
        return post(operations, desc)

    return counting
