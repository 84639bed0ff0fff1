"""What is in the messages of workers that average in pairs (AD-PSGD), with the rank that keeps the account and with each other.

worker -> keeper   HELLO, at first;  ASK: (steps of each worker in its weights, what it did since);  LEARN: (step, place),
                   (count, loss sum, seconds);  STATE: [weights, statistics];  FAILED: a text
keeper -> worker   BEGIN: [weights, statistics];  SHARE: (step, place, number of the gradient, *dead workers), or of these
                   alone where there is no share;  SHOW, for its state;  GO_ON;  END: as of a server
active -> passive  OFFER: (clock, steps of each worker), [weights, statistics]
passive -> active  MEAN: the same, of both

Clocks are Lamport's: a worker's counts its own doings, and a pair takes the larger one.  So an order by clocks has what caused
something before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from widefield.agreement.serving import Share
from widefield.comm.requests import Message

ASK, LEARN, STATE, BEGIN, SHARE, SHOW, GO_ON, OFFER, MEAN = range(11, 20)
_NOBODY = -1
_DONE = 5
"""Numbers of a Done."""


@dataclass(frozen=True)
class Done:
    """Something that a worker did: its step with the gradient `own`, or a pair.

    clock: after it.  other: with whom; -1 of a step.  own, others: of a pair, how many steps of its own each had made.
    micros: when, in microseconds since the epoch of the system's clock.
    """

    clock: int
    other: int
    own: int
    others: int
    micros: int

    @property
    def is_step(self) -> bool:
        return self.other == _NOBODY

    @classmethod
    def step(cls, clock: int, gradient: int, micros: int) -> Done:
        return cls(clock, _NOBODY, gradient, 0, micros)


def ask(has: Sequence[int], did: Sequence[Done]) -> Message:
    return Message(ASK, (*has, *(number for one in did for number in astuple(one))))


def asked_for(message: Message, workers: int) -> tuple[tuple[int, ...], list[Done]]:
    """(has, did) of a worker, as `ask` took them."""
    has, rest = message.ints[:workers], message.ints[workers:]
    return has, [Done(*rest[start : start + _DONE]) for start in range(0, len(rest), _DONE)]


def share_message(share: Share | None, gradient: int, dead: Sequence[int]) -> Message:
    """share: None where the worker is to ask again."""
    return Message(SHARE, (*(share or (_NOBODY, _NOBODY)), gradient, *dead))


def share_of_message(message: Message) -> tuple[Share | None, int, tuple[int, ...]]:
    """(share, gradient, dead), as `share_message` took them."""
    step, place, gradient, *dead = message.ints
    return None if step == _NOBODY else (step, place), gradient, tuple(dead)


def learn(share: Share, *, count: float, loss_sum: float, seconds: float) -> Message:
    return Message(LEARN, share, (count, loss_sum, seconds))


def weights_message(kind: int, clock: int, has: Sequence[int], state: Tensor) -> Message:
    """An OFFER or a MEAN."""
    return Message(kind, (clock, *has), (), state)


def bytes_of_pair(workers: int, *, of_state: int, itemsize: int) -> int:
    """What two workers send each other for a mean.  of_state: values, of a FlatModel."""
    return 2 * (8 * (5 + 1 + workers) + of_state * itemsize)
