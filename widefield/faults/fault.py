"""What a fault is: where and when something befalls a rank, and what.  No torch, so that a text is checked at once.

    rank=1 step=7 phase=forward kind=kill
    rank=any step=3-9 phase=any kind=exception seed=4; rank=0 step=5+ phase=data kind=delay seconds=0.2

One fault per part between semicolons.  What is left open is drawn from the seed, alike on every rank.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VARIABLE = "WIDEFIELD_FAULTS"
"""The environment variable that asks for faults."""

_ANYWHERE = ("exception", "kill", "stop", "delay", "out_of_memory")
KINDS_OF_PHASE = {
    "data": (*_ANYWHERE, "io_error", "wrong_shape", "nan", "bit_flip"),
    "forward": (*_ANYWHERE, "nan", "deadlock"),
    "halo": (*_ANYWHERE, "wrong_shape", "skip", "nan", "bit_flip"),
    "backward": (*_ANYWHERE, "nan", "bit_flip"),
    "collective": (*_ANYWHERE, "wrong_shape", "wrong_operation", "skip", "nan", "bit_flip"),
    "optimizer": (*_ANYWHERE, "nan", "bit_flip"),
    "save": (*_ANYWHERE, "disk_full", "io_error", "truncated_write"),
    "load": (*_ANYWHERE, "io_error"),
}
"""Every phase, and what may befall it.

data: the next batch is fetched.  halo: messages between two ranks, of tiles or of stages.  optimizer: the step, and the weights
after it.  save: this rank's file of a checkpoint is written.  nan of forward is the loss, of backward a gradient.
deadlock: the rank waits for a message that nobody sends.
"""
ACTS = (*_ANYWHERE, "io_error", "disk_full")
"""Kinds that happen before the work; the others change what it takes or gives."""


@dataclass(frozen=True)
class PlantedFault:
    """first, last: the steps at which it comes, the first of the run being 1; 0 is before it.  A load's is the step loaded.

    call: at which call of the phase within the step, from 1.  seconds: of a delay.  every: at every one of the steps, not once.
    seed: chooses the number or the bit that is made wrong.  asked: the words that asked for it, with their number.
    """

    rank: int
    phase: str
    kind: str
    first: int
    last: int
    call: int = 1
    seconds: float = 5.0
    every: bool = False
    seed: int = 0
    asked: str = ""

    def is_at(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        """Its text, with nothing left open."""
        last = _ANY_STEP if self.last >= _FOREVER and not self.every else None
        step = last or f"{self.first}{'+' if self.every else ''}"
        words = f"rank={self.rank} step={step} phase={self.phase} kind={self.kind} call={self.call}"
        words += f" seconds={self.seconds:g}" if self.kind == "delay" else ""
        return words + (f" seed={self.seed}" if self.kind in ("nan", "bit_flip", "truncated_write") else "")


_FOREVER, _ANY_STEP = 2**62, "any"
_KEYS = ("rank", "step", "phase", "kind", "call", "seconds", "seed")


def faults_of(text: str, *, ranks: int, goes_on: bool = False) -> list[PlantedFault]:
    """The faults that a text asks for.

    goes_on: the run had begun before, perhaps on more ranks, so those of other ranks are left out.
    ValueError: the text cannot be read, or names a rank, phase or kind that there is not.
    """
    found = [_fault(part, number, ranks) for number, part in enumerate(text.split(";"), 1) if part.strip()]
    for fault in found if not goes_on else ():
        if fault.rank >= ranks:
            raise ValueError(_unreadable(fault.asked, f"rank {fault.rank} is not among the {ranks} of this run"))
    return [fault for fault in found if fault.rank < ranks]


def _fault(text: str, number: int, ranks: int) -> PlantedFault:
    given = dict(_pair(word, text) for word in text.split())
    missing = [key for key in ("rank", "step", "phase", "kind") if key not in given]
    if missing:
        raise ValueError(_unreadable(text, f"it lacks {', '.join(missing)}"))
    seed = _whole("seed", given.get("seed", "0"), text)
    draw = random.Random(f"{seed}/{number}")
    rank = draw.randrange(ranks) if given["rank"] == "any" else _whole("rank", given["rank"], text)
    phase = _one_of("phase", given["phase"], list(KINDS_OF_PHASE), text, draw)
    kind = _one_of("kind", given["kind"], list(KINDS_OF_PHASE[phase]), text, draw)
    first, last, every = _steps(given["step"], text, draw)
    call, seconds = _whole("call", given.get("call", "1"), text), _number(given.get("seconds", "5"), text)
    if call < 1:
        raise ValueError(_unreadable(text, "call is 0, and calls are counted from 1"))
    asked = f"{number}. {' '.join(text.split())}"
    return PlantedFault(rank, phase, kind, first, last, call, seconds, every, seed, asked)


def _pair(word: str, text: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if key not in _KEYS or not equals or not value:
        raise ValueError(_unreadable(text, f"{word!r} is none of {', '.join(f'{key}=...' for key in _KEYS)}"))
    return key, value


def _steps(value: str, text: str, draw: random.Random) -> tuple[int, int, bool]:
    """First and last step, and whether the fault comes at each of them."""
    if value == _ANY_STEP:
        return 0, _FOREVER, False
    if value.endswith("+"):
        return _whole("step", value[:-1], text), _FOREVER, True
    first, dash, last = value.partition("-")
    low = _whole("step", first, text)
    high = _whole("step", last, text) if dash else low
    if high < low:
        raise ValueError(_unreadable(text, f"the steps {value} end before they begin"))
    step = draw.randint(low, high)
    return step, step, False


def _one_of(key: str, value: str, known: list[str], text: str, draw: random.Random) -> str:
    if value == "any":
        return draw.choice(known)
    if value not in known:
        raise ValueError(_unreadable(text, f"{key}={value} is none of {', '.join(known)}"))
    return value


def _whole(key: str, value: str, text: str) -> int:
    if not value.isdecimal():
        raise ValueError(_unreadable(text, f"{key}={value} is no whole number"))
    return int(value)


def _number(value: str, text: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ValueError(_unreadable(text, f"seconds={value} is no time of up to a million seconds"))
    return seconds


def _unreadable(text: str, why: str) -> str:
    return f"the fault {' '.join(text.split())!r} cannot be injected: {why}; see the page on failures for {VARIABLE}"
