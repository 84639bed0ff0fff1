"""What collectives has this rank begun, and which are not done?  torch's flight recorder keeps the last 2,000.

It records NCCL's collectives, and in newer versions of torch gloo's, always; TORCH_FR_BUFFER_SIZE=0 turns it off.  Reading
it takes some milliseconds, so it is read when a step does not end, and not before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from widefield.private_torch.process_groups import flight_records

Flight = tuple[str, str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""The group, the operation, shapes and dtypes."""


@dataclass(frozen=True)
class RecordedCollective:
    """One collective.  number: its place among those of its group, from 1.  created_ns: by time.time_ns().

    done: whether it has completed, as far as the recorder knows.  is_p2p: whether it is between two ranks.
    """

    group: str
    description: str
    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    created_ns: int
    done: bool
    is_p2p: bool

    @property
    def flight(self) -> Flight:
        return self.group, self.operation, self.shapes, self.dtypes

    def __str__(self) -> str:
        """`all_reduce (Float [3, 4]), number 17 of its group`."""
        what = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=False))
        return f"{self.operation}{f' ({what})' if what else ''}, number {self.number} of group {self.group}"


def recorded(read: Callable[[], Sequence[str]] = flight_records) -> list[RecordedCollective]:
    """All that the recorders hold, the oldest first; [] where there is none.  read: gives the dumps, as JSON."""
    found = [_of(entry) for text in read() for entry in json.loads(text or "{}").get("entries", [])]
    return sorted(found, key=lambda one: one.created_ns)


def _of(entry: dict[str, Any]) -> RecordedCollective:
    name, description = (*entry.get("process_group", ["", ""]), "")[:2]
    is_p2p = bool(entry.get("is_p2p", False))
    return RecordedCollective(
        group=str(name),
        description=str(description),
        number=int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", 0)),
        operation=str(entry.get("profiling_name", "")).split(":", 1)[-1],
        shapes=tuple(tuple(map(int, shape)) for shape in entry.get("input_sizes", [])),
        dtypes=tuple(map(str, entry.get("input_dtypes", []))),
        created_ns=int(entry.get("time_created_ns", 0)),
        done=entry.get("state") == "completed" or bool(entry.get("retired")),
        is_p2p=is_p2p,
    )


def under_way(found: Sequence[RecordedCollective]) -> RecordedCollective | None:
    """The collective that the rank waits for: the oldest that is not done."""
    return next((one for one in found if not one.done), None)


def odd(found: Sequence[RecordedCollective], *, before_ns: int, step_ns: int) -> str:
    """In what the collectives since `step_ns` differ from those of the step before, which began at `before_ns`.

    Compared group by group, as far as both go, since the groups of a rank need no common order.  Empty where none differs.
    """
    step = [one for one in found if one.created_ns >= step_ns]
    before = [one for one in found if before_ns <= one.created_ns < step_ns]
    for group in dict.fromkeys(one.group for one in before):
        was, now = ([one for one in part if one.group == group] for part in (before, step))
        for number, (old, new) in enumerate(zip(was, now, strict=False), 1):
            if old.flight != new.flight:
                was_it = f"and was {_short(old)} in the step before"
                return f"collective {number} of this step in group {group} is {_short(new)}, {was_it}"
    return ""


def _short(one: RecordedCollective) -> str:
    return str(one).rpartition(", number")[0]
