"""Quantities in a recipe: `90ep` of training, `6GiB` of memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

Unit = Literal["ep", "step"]


@dataclass(frozen=True)
class Duration:
    """A length of training: `90ep` (epochs) or `2000step` (optimizer steps)."""

    count: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.count}{self.unit}"

    def in_steps(self, steps_per_epoch: int) -> int:
        return self.count * (steps_per_epoch if self.unit == "ep" else 1)


def read_duration(text: object) -> Duration:
    """The Duration of `"90ep"` or `"2000step"`.  ValueError: another text."""
    if isinstance(text, Duration):
        return text
    match = re.fullmatch(r"(\d+)\s*(ep|step)", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"not a duration: {text!r}; write a whole number and a unit, as 90ep (epochs) or 2000step")
    return Duration(int(match[1]), match[2])  # type: ignore[arg-type]


_DURATION = WithJsonSchema({"type": "string", "pattern": r"^\d+\s*(ep|step)$", "examples": ["90ep", "2000step"]})
DurationField = Annotated[Duration, BeforeValidator(read_duration), PlainSerializer(str), _DURATION]


def _at_least_one(every: Duration) -> Duration:
    if every.count < 1:
        raise ValueError(f"{every} never comes; write 1ep or 1step or more")
    return every


Every = Annotated[DurationField, AfterValidator(_at_least_one)]

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def read_memory(text: object) -> int:
    """The bytes of `"6GiB"`, `"1.5GiB"` or `"800 MiB"`.  ValueError: another text, or less than a byte."""
    match = _MEMORY.fullmatch(text) if isinstance(text, str) else None
    size = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < math.inf:
        raise ValueError(f"no amount of memory: {text!r}; write a number above 0 and a unit, as 6GiB, 1.5GiB or 800MiB")
    return int(size)


def bytes_text(size: float) -> str:
    """A size as 1.5 GiB, 12 MiB or 300 KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}" if size < 10 * unit else f"{size / unit:.0f} {name}"
    return f"{size / 2**10:.0f} KiB"


def size_text(size: float) -> str:
    """As `bytes_text`; below 1 KiB, `40 bytes`."""
    return bytes_text(size) if size >= 2**10 else f"{size:.0f} bytes"


def count_of(number: int, noun: str, several: str | None = None) -> str:
    """`1 step`, `1,205 steps`.  several: the plural, where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def _as_memory(text: object) -> str:
    read_memory(text)
    return str(text)


_AMOUNT = WithJsonSchema({"type": "string", "pattern": rf"^{_MEMORY.pattern}$"})
Memory = Annotated[str, BeforeValidator(_as_memory), _AMOUNT]
