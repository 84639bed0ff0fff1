"""What is in the messages of workers that average in pairs (AD-PSGD), with the rank that keeps the account and with each other.

worker -> keeper   HELLO, at first;  ASK: (steps of each worker in its weights, what was done);  LEARN: (step, place),
                   (count, loss sum, seconds);  STATE: [weights, statistics];  FAILED: a text
keeper -> worker   BEGIN: [weights, statistics];  SHARE: (step, place, number of the gradient, by worker the clock until which
                   the keeper knows what it did, *dead workers), with the step -1 where there is no share;  SHOW, for its
                   state;  GO_ON;  END: as of a server
active -> passive  OFFER: (clock, steps of each worker, what was done), [weights, statistics]
passive -> active  MEAN: the same, of both

Clocks are Lamport's: a worker's counts its own doings, and a pair takes the larger one.  So an order by clocks has what caused
something before it.  What was done goes with the weights that it is in, as far as the keeper may not know of it: so the log has
all that is in the weights of the living, also where nobody who did it lives.
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
    """Something that was done: a step of `worker`, or a pair, for which `worker` asked `other`.

    clock: after it.  other: -1 of a step.  number: of a step, its gradient's; of a pair, the bytes that were sent for it.
    micros: when, in microseconds since the epoch of the system's clock.
    """

    clock: int
    worker: int
    other: int
    number: int
    micros: int

    @property
    def is_step(self) -> bool:
        return self.other == _NOBODY

    @classmethod
    def step(cls, clock: int, worker: int, gradient: int, micros: int) -> Done:
        return cls(clock, worker, _NOBODY, gradient, micros)


def _of_done(done: Sequence[Done]) -> tuple[int, ...]:
    return tuple(number for one in done for number in astuple(one))


def done_of(ints: Sequence[int]) -> list[Done]:
    return [Done(*ints[start : start + _DONE]) for start in range(0, len(ints), _DONE)]


def ask(has: Sequence[int], done: Sequence[Done]) -> Message:
    return Message(ASK, (*has, *_of_done(done)))


def asked_for(message: Message, workers: int) -> tuple[tuple[int, ...], list[Done]]:
    """(has, done) of a worker, as `ask` took them."""
    return message.ints[:workers], done_of(message.ints[workers:])


def share_message(share: Share | None, gradient: int, known: Sequence[int], dead: Sequence[int]) -> Message:
    """share: None where the worker is to ask again.  known: of each worker, a clock."""
    return Message(SHARE, (*(share or (_NOBODY, _NOBODY)), gradient, *known, *dead))


def share_of_message(message: Message, workers: int) -> tuple[Share | None, int, tuple[int, ...], tuple[int, ...]]:
    """(share, gradient, known, dead), as `share_message` took them."""
    step, place, gradient, *rest = message.ints
    return None if step == _NOBODY else (step, place), gradient, tuple(rest[:workers]), tuple(rest[workers:])


def learn(share: Share, *, count: float, loss_sum: float, seconds: float) -> Message:
    return Message(LEARN, share, (count, loss_sum, seconds))


def weights_message(kind: int, clock: int, has: Sequence[int], done: Sequence[Done], state: Tensor) -> Message:
    """An OFFER or a MEAN."""
    return Message(kind, (clock, *has, *_of_done(done)), (), state)


def of_weights_message(message: Message, workers: int) -> tuple[int, list[int], list[Done], Tensor]:
    """(clock, has, done, state), as `weights_message` took them."""
    assert message.values is not None, "an offer and a mean have weights"
    clock, *rest = message.ints
    return clock, rest[:workers], done_of(rest[workers:]), message.values


def bytes_of_pair(workers: int, *, of_state: int, itemsize: int, done: int = 0) -> int:
    """What two workers send each other for a mean.  of_state: values, of a FlatModel.  done: how many of these they tell."""
    return 2 * (8 * (5 + 1 + workers) + of_state * itemsize) + 8 * _DONE * done
