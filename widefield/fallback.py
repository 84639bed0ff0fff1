"""Which operations do not run as the plan asks, and how many bytes do they take?

A plan cuts a model into tiles, channels or stages.  An operation that cannot be cut runs on the whole tensor, with the same
numbers, but takes more memory or time.  Each such place is a `Fallback`.  A run reports all of them, the largest first, with
the total for each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from widefield.quantity import size_text

Kind = Literal["run whole", "run in strips", "drawn whole", "gathered", "left whole", "whole batch"]
MEANINGS: dict[Kind, str] = {
    "run whole": "on the whole image at once",
    "run in strips": "cut along fewer dims of the image than it has tiles",
    "drawn whole": "random numbers for the whole, as one device draws them",
    "gathered": "in full on every rank",
    "left whole": "on every rank, for cutting them would send more than it saves",
    "whole batch": "at once, in place of micro-batches",
}
"""The kinds, in the order in which they are reported, and the end of each kind's sentence."""
ROWS_MOST = 5
"""How many places of a kind a run's reasons name; its record, its report and a verdict have all of them."""


@dataclass(frozen=True)
class Fallback:
    """An operation of a model that does not run as the plan asks.

    module: the qualified name of the module that called it, "" for the model itself.  operation: torch's name for it.
    bytes: of the full tensors that a rank holds for it in one pass, without those that an earlier Fallback counts.
    why: a clause; "" where the kind says enough.  count: the number of such operations at this place.
    """

    kind: Kind
    module: str
    operation: str
    bytes: int
    why: str = ""
    count: int = 1

    @property
    def place(self) -> str:
        """`decoder.up2.attention's bmm`."""
        return f"{self.module or 'the model'}'s {self.operation}"

    def __str__(self) -> str:
        """`decoder.up2.attention's bmm (800 MiB): no file in ops/ has a rule for it`."""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.place} ({size_text(self.bytes)}{times})" + (f": {self.why}" if self.why else "")


def by_size(fallbacks: Iterable[Fallback]) -> list[Fallback]:
    """The fallbacks, the largest first; those with the same place and reason are added up."""
    found: dict[tuple, Fallback] = {}
    for one in fallbacks:
        key = one.kind, one.module, one.operation, one.why
        before = found.get(key)
        both = one if before is None else replace(before, bytes=before.bytes + one.bytes, count=before.count + one.count)
        found[key] = both
    return sorted(found.values(), key=lambda one: -one.bytes)


def by_kind(fallbacks: Iterable[Fallback]) -> dict[Kind, list[Fallback]]:
    """The fallbacks of each kind that occurs, the largest first."""
    ordered = by_size(fallbacks)
    found = {kind: [one for one in ordered if one.kind == kind] for kind in MEANINGS}
    return {kind: rows for kind, rows in found.items() if rows}


def head_of(kind: Kind, rows: Sequence[Fallback]) -> str:
    """`run whole: 3 operations, 1.2 GiB in all, on the whole image at once`."""
    count = sum(row.count for row in rows)
    total = size_text(sum(row.bytes for row in rows))
    return f"{kind}: {count} operation{'s' * (count > 1)}, {total} in all, {MEANINGS[kind]}"


def in_words(fallbacks: Iterable[Fallback], *, most: int = ROWS_MOST) -> list[str]:
    """A sentence with the total for each kind, then one for each of its `most` largest places.

    Places of a kind without reasons are listed in the kind's own sentence.
    """
    sentences: list[str] = []
    for kind, rows in by_kind(fallbacks).items():
        head, left = head_of(kind, rows), rows[most:]
        rest = [f"{len(left)} more ({size_text(sum(row.bytes for row in left))})"] if left else []
        if any(row.why for row in rows):
            sentences += [head, *(f"{kind}: {row}" for row in rows[:most]), *(f"{kind}: and {more}" for more in rest)]
        else:
            sentences.append(f"{head}: {', '.join([*map(str, rows[:most]), *rest])}")
    return sentences
