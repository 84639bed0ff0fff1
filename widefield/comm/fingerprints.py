"""Do all ranks call the same collectives?  The first steps are compared, before a difference becomes a hang.

Before each collective of the first steps, a rank writes what it is about to call into the rendezvous store: operation, dtype
and number of numbers, under the group and the collective's place in it.  Whoever comes second sees the difference, and raises
instead of calling.  Nobody waits, so the order of messages stays as it is.  A collective costs one round trip to the store in
these steps, and nothing after them.  It needs the hooks that torch has from 2.14 on; without them nothing is compared.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.stand import place_of
from widefield.private_torch.process_groups import group_hooks

STEPS = 2
"""How many steps are compared: the second also tells which rank has changed its way."""
VOTE_SECONDS = 2.0
"""How long a rank that finds a difference waits for what further ranks call, to tell who is the odd one."""
_COMPARED = {"BROADCAST", "ALLREDUCE", "REDUCE", "ALLGATHER", "REDUCE_SCATTER", "GATHER"}
"""Operations in which every rank must pass the same number of numbers; of others the operation alone is compared."""


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to call.  changed: whether no step before had it in this group; None: there was no step before."""

    rank: int
    operation: str
    dtype: str
    numbers: int
    place: str
    changed: bool | None = None

    def is_like(self, other: Fingerprint) -> bool:
        return (self.operation, self.dtype, self.numbers) == (other.operation, other.dtype, other.numbers)

    def __str__(self) -> str:
        size = f" ({self.dtype}, {self.numbers:,} numbers)" if self.numbers >= 0 else ""
        return f"rank {self.rank} calls {self.operation.lower()}{size} at {self.place}"


class RanksDifferError(RuntimeError):
    """Ranks call different collectives.  culprits: those that differ from most, or that changed; both of two otherwise."""

    def __init__(self, text: str, culprits: Sequence[int]) -> None:
        super().__init__(text)
        self.culprits = list(culprits)


class Fingerprints:
    """Compares the collectives of the groups until `close`; call `begin_step` where a step begins, on the main thread."""

    def __init__(self, store: dist.Store, groups: Sequence[dist.ProcessGroup], *, rank: int) -> None:
        self._store, self._rank, self._steps = store, rank, 0
        self._numbers: Counter[str] = Counter()
        self._called: set[tuple[str, str, str, int]] = set()
        self._before: set[tuple[str, str, str, int]] = set()
        self._close = [self._hooked(group) for group in groups]

    def _hooked(self, group: dist.ProcessGroup) -> Callable[[], None]:
        ranks = dist.get_process_group_ranks(group)
        return group_hooks(group, partial(self._before_a_call, f"{group.group_name}:{ranks[0]}", ranks))

    def begin_step(self) -> None:
        self._before |= self._called
        self._steps += 1
        if self._steps > STEPS:
            self.close()

    @property
    def is_open(self) -> bool:
        return bool(self._close)

    def close(self) -> None:
        """End the comparison.  Fingerprint it on the thread that sends the messages."""
        while self._close:
            self._close.pop()()

    def _before_a_call(self, group: str, ranks: list[int], operation: str, tensors: Sequence[Tensor]) -> None:
        """RanksDifferError: another rank calls something else at this place."""
        if operation in ("SEND", "RECV"):
            return
        numbers = sum(tensor.numel() for tensor in tensors) if operation in _COMPARED else -1
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self._numbers[group] += 1
        key, mine = f"{group}/{self._numbers[group]}", self._call(group, operation, dtype, numbers)
        first = Fingerprint(**json.loads(self._store.compare_set(key, "", json.dumps(asdict(mine)))))
        if not mine.is_like(first):
            raise self._difference(key, ranks, mine, first)

    def _call(self, group: str, operation: str, dtype: str, numbers: int) -> Fingerprint:
        this = (group, operation, dtype, numbers)
        self._called.add(this)
        changed = this not in self._before if self._steps > 1 else None
        return Fingerprint(self._rank, operation, dtype, numbers, _caller(), changed)

    def _difference(self, key: str, ranks: list[int], mine: Fingerprint, first: Fingerprint) -> RanksDifferError:
        odd, size = self._odd_ones(key, ranks, mine), len(ranks)
        culprits = sorted(odd)
        if 2 * len(odd) > size:
            culprits = [first.rank]
        elif 2 * len(odd) == size:
            both = [first, *odd.values()]
            changed = [call.rank for call in both if call.changed]
            culprits = changed if 0 < len(changed) < len(both) else sorted(call.rank for call in both)
        who = ", ".join(map(str, culprits))
        blame = f"rank {who} is the odd one" if len(culprits) == 1 else f"ranks {who} do not agree"
        return RanksDifferError(
            f"the ranks do not call the same: {first}, and {mine}; it is collective {key.rpartition('/')[2]} of a group of "
            f"{size} ranks, in step {self._steps} of this process; {blame}. All ranks must call the same operations on the "
            "same shapes in the same order: look for a branch that only some ranks take",
            culprits,
        )

    def _odd_ones(self, key: str, ranks: list[int], mine: Fingerprint) -> dict[int, Fingerprint]:
        """The ranks that differ from the first one, as far as they come within VOTE_SECONDS."""
        keys = {rank: f"{key}/odd/{rank}" for rank in ranks}
        self._store.set(keys[self._rank], json.dumps(asdict(mine)))
        deadline, odd = time.monotonic() + VOTE_SECONDS, {self._rank: mine}
        while time.monotonic() < deadline and len(odd) < len(ranks) - 1:
            time.sleep(0.05)
            there = {rank: one for rank, one in keys.items() if self._store.check([one])}
            odd = {rank: Fingerprint(**json.loads(self._store.get(one))) for rank, one in there.items()}
        return odd


def _caller() -> str:
    """The line that calls a collective."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, group_hooks.__code__.co_filename):
        frame = frame.f_back
    return place_of(frame)


def is_possible(group: Any) -> bool:
    """Whether torch has the hooks."""
    return hasattr(group, "register_pre_hook")


def why_not_compared(group: Any) -> list[str]:
    """In a sentence, that the first steps are not compared; none where they are.  group: of all ranks; None of one rank."""
    if group is None or is_possible(group):
        return []
    return [
        f"watch: the messages of the first steps are not compared, for which torch {torch.__version__} has no hooks and 2.14 "
        "has; ranks that call different ones are found when they hang"
    ]
