"""A row of a result: a figure with its spread and n.  Programs that measure hand rows on as lines of text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MARK = "ROW "
"""What a line of a row begins with, among all else that a process writes."""


@dataclass(frozen=True)
class Row:
    """`value` is the median of n figures, with the lowest and the highest of them; where n is 1 all three are that one.

    note: what else belongs to the figure, as the next size that did not fit.
    """

    name: str
    value: float
    unit: str
    n: int = 1
    lowest: float | None = None
    highest: float | None = None
    note: str = ""

    @property
    def text(self) -> str:
        spread = "" if self.n == 1 else f" ({number(self.lowest)} to {number(self.highest)}, n = {self.n})"
        return f"{self.name}: {number(self.value)} {self.unit}".rstrip() + spread + (f"; {self.note}" if self.note else "")


def number(value: float | None) -> str:
    """Four digits, or all of a whole number.

    >>> [number(value) for value in (0.98765, 23552.0, 1234.5)]
    ['0.9877', '23,552', '1,234']
    """
    if value is None:
        return "?"
    return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:.4g}"


def row_of(name: str, values: Sequence[float], unit: str, *, note: str = "") -> Row:
    """The median of figures, with their spread.  ValueError where there are none."""
    if not values:
        raise ValueError(f"{name} has no figure to take the median of; measure it at least once")
    return Row(name, statistics.median(values), unit, len(values), min(values), max(values), note)


def tell(row: Row) -> None:
    """Hand a row to the process that started this one and reads what it prints."""
    print(MARK + json.dumps(asdict(row)), flush=True)


def told(line: str) -> Row | None:
    """The row that a line of a process's output hands on; None for any other line."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None
