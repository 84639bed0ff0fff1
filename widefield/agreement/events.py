"""The log of a run: what happened when, from which the run is computed again bit for bit; and the queue of what is to come.

Times do not depend on weights.  So a run has two halves: its times (round_times.py, pair_times.py, server_times.py) make the
log, and its numbers (peer_weights.py, server_weights.py) are a function of the log.

A kind of event, and what it does to the numbers:

    read      worker takes a part of the server's weights, or its own, for its next gradient
    gradient  worker has computed the gradient `number` of `samples`; `seconds` long
    push      the server updates a part with the gradient `number`
    reduce    all replicas, or the server, step with the mean of the `numbers`
    drop      the gradient `number`, of `samples`, is used for nothing
    step      worker steps with the gradient `number`
    average   `workers` take the mean of their weights, and begin their optimizers anew where `part` is 1
    outer     the outer optimizer takes the mean of the weights of `workers`; all take what it gives
    send      the weights of the first of `workers`, as they are, are on their way to the others, as those of round `part`
    mix       the first of `workers` takes what it has and what the others sent in `rounds`, times `weights`
    offer     two workers send each other their weights; nothing changes them until the pair, or the end of one
    pair      both take the mean of what was sent
    die       worker is gone, and with it what it alone had learned, of `samples`
    join      the first of `workers` takes the state of the second, or of the server
    stand     nothing: `workers` are all that live, and their weights have learned from `part` whole steps and nothing else
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from typing import Any

KINDS = (
    "read", "gradient", "push", "reduce", "drop", "step", "average", "outer", "send", "mix", "offer", "pair", "die",
    "join", "stand",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One line of a log.

    time: virtual seconds.  samples: numbers of samples, counted over epochs (number modulo the size of the data set is the
    index).  part: of the server's parameters, or the number of a round; of a gradient, how many readings of its worker came
    after the one that it is of.  numbers: of gradients.  seconds: how long a worker computed.  bytes: that were sent for this.
    weights: of a mix.  rounds: in which each of its other workers sent.
    """

    time: float
    kind: str
    workers: tuple[int, ...]
    samples: tuple[int, ...] = ()
    part: int = 0
    numbers: tuple[int, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    weights: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()

    def to_json(self) -> str:
        """One line; what is empty is left out.  Floats are written such that the same bits are read."""
        defaults = {one.name: one.default for one in fields(self)}
        return json.dumps({key: value for key, value in asdict(self).items() if value != defaults[key]})

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Read what `to_json` wrote.  ValueError: a line that is none."""
        try:
            tree: dict[str, Any] = json.loads(line)
            fields_of: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in tree.items()}
            event = cls(**fields_of)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not an event of a log: {line[:80]!r} ({error}); a log is read as it was written") from None
        if event.kind not in KINDS:
            raise ValueError(f"an event of the kind {event.kind!r} in a log; there are {', '.join(KINDS)}")
        return event


@dataclass(frozen=True)
class EventLog:
    """All events in the order in which they happen, and of what run.

    algorithm: how workers agree, in words; a log is replayed with the same.  numel: how many weights.  seconds: when the run
    ended.  exact: whether the events say all that the weights depend on.
    """

    algorithm: str
    workers: int
    num_samples: int
    epochs: int
    numel: int
    seconds: float
    events: tuple[Event, ...]
    exact: bool = True

    def to_text(self) -> str:
        """A header and a line per event, in JSON."""
        header = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "events"}
        return "\n".join([json.dumps(header), *(event.to_json() for event in self.events)]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> EventLog:
        """Read what `to_text` wrote.  ValueError: another text."""
        header, *lines = text.splitlines() or [""]
        try:
            options: dict[str, Any] = json.loads(header)
            return cls(**options, events=tuple(Event.from_json(line) for line in lines))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a log of a simulation: it begins with {header[:80]!r} ({error})") from None


@dataclass
class EventQueue:
    """What happens next in virtual time.  What is planned for the same time happens in the order in which it was planned."""

    now: float = 0.0
    planned: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: count = field(default_factory=count)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan an action.  AssertionError: for a time that is over."""
        assert time >= self.now, f"an action is planned for {time} s, and it is {self.now} s"
        heapq.heappush(self.planned, (time, next(self.numbers), action))

    def run(self, until: Callable[[], bool]) -> bool:
        """Do what is planned until the condition holds; whether it did before nothing was left."""
        while not until():
            if not self.planned:
                return False
            self.now, _, action = heapq.heappop(self.planned)
            action()
        return True


def in_time_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events by time; those of one time stay in their order."""
    return tuple(sorted(events, key=lambda event: event.time))
